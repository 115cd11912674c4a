//! How many tokens of which prompts go into the next step.

/// The room of one step. Prompts are offered in order, the oldest first. Tokens of texts that are being continued are not
/// counted: there is one for each, so they can neither fill a step nor be starved by prompts.
pub(crate) struct Packing {
    left: usize,
    /// Whether a prompt is in.
    taken: bool,
}

impl Packing {
    /// Of `budget` prompt tokens.
    pub(crate) fn new(budget: usize) -> Self {
        Self { left: budget, taken: false }
    }

    /// The part of a prompt that has begun, with `left` tokens to go. Such a one goes on with what room there is.
    pub(crate) fn part_of_cached(&mut self, left: usize) -> usize {
        self.take(left.min(self.left))
    }

    /// The part of a prompt that has a cache and begins: the whole if there is room. One that is longer than the
    /// whole budget begins with a part, once it is the first of its step.
    pub(crate) fn part_of_new_cached(&mut self, tokens: usize) -> usize {
        match (tokens <= self.left, self.taken) {
            (true, _) => self.take(tokens),
            (false, false) => self.take(self.left),
            (false, true) => 0,
        }
    }

    /// A prompt that must be run at once: all of it, or nothing. The first of a step goes in even if it is longer than
    /// the budget, and is the only one then.
    pub(crate) fn whole(&mut self, tokens: usize) -> usize {
        match tokens <= self.left || !self.taken {
            true => self.take(tokens),
            false => 0,
        }
    }

    fn take(&mut self, tokens: usize) -> usize {
        self.left = self.left.saturating_sub(tokens);
        self.taken |= tokens > 0;
        tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wholes(budget: usize, prompts: &[usize]) -> Vec<usize> {
        let mut packing = Packing::new(budget);
        prompts.iter().map(|&tokens| packing.whole(tokens)).take_while(|&part| part > 0).collect()
    }

    #[test]
    fn a_step_is_filled_up_to_the_budget_and_nobody_is_overtaken() {
        assert_eq!(wholes(10, &[3, 4, 3, 1]), [3, 4, 3]);
        assert_eq!(wholes(10, &[6, 6, 1]), [6]);
        assert_eq!(wholes(10, &[]), [0; 0]);
    }

    #[test]
    fn a_prompt_longer_than_the_budget_runs_alone() {
        assert_eq!(wholes(10, &[11, 1]), [11]);
        assert_eq!(wholes(10, &[usize::MAX, usize::MAX]), [usize::MAX]);
    }

    #[test]
    fn a_long_prompt_in_parts_goes_on_before_others_begin() {
        let mut packing = Packing::new(10);
        assert_eq!(packing.part_of_new_cached(25), 10);
        assert_eq!(packing.whole(1), 0);
        let mut packing = Packing::new(10);
        assert_eq!((packing.part_of_cached(15), packing.whole(3)), (10, 0));
        let mut packing = Packing::new(10);
        assert_eq!((packing.part_of_cached(5), packing.whole(3), packing.part_of_new_cached(3)), (5, 3, 0));
        assert_eq!(packing.part_of_new_cached(2), 2);
    }
}
