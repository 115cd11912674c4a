//! Which of the waiting prompts go into the next step.

/// How many items to take from the heads of two queues so that their tokens stay within `budget`.
///
/// The queue called first has the first pick: its head goes in even if it is longer than the whole budget (it then runs
/// alone), so a caller that gives the two queues the first pick in turn starves neither. Both queues are taken strictly in
/// order, so nobody is overtaken within one.
pub(crate) fn pack(
    first: impl IntoIterator<Item = usize>,
    second: impl IntoIterator<Item = usize>,
    budget: usize,
) -> (usize, usize) {
    let mut used = 0usize;
    let mut taken = 0usize;
    let mut take = |costs: &mut dyn Iterator<Item = usize>| {
        let before = taken;
        for cost in costs {
            if taken > 0 && used.saturating_add(cost) > budget {
                break;
            }
            used = used.saturating_add(cost);
            taken += 1;
        }
        taken - before
    };
    (take(&mut first.into_iter()), take(&mut second.into_iter()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_filled_up_to_the_budget() {
        assert_eq!(pack([3, 4, 3, 1], [], 10), (3, 0));
        assert_eq!(pack([3, 4], [2, 1, 1], 10), (2, 2));
        assert_eq!(pack([], [], 10), (0, 0));
    }

    #[test]
    fn a_prompt_longer_than_the_budget_runs_alone() {
        assert_eq!(pack([11, 1], [1], 10), (1, 0));
        assert_eq!(pack([], [11, 1], 10), (0, 1));
    }

    #[test]
    fn nobody_is_overtaken_by_a_shorter_one_behind() {
        assert_eq!(pack([6, 6, 1], [], 10), (1, 0));
    }

    #[test]
    fn with_the_first_pick_in_turn_a_long_head_waits_one_step_at_most() {
        let (long, decoding) = ([9usize, 1], [4usize, 4]);
        assert_eq!(pack(decoding, long, 10), (2, 0));
        assert_eq!(pack(long, decoding, 10), (2, 0));
    }

    #[test]
    fn lengths_near_the_top_of_the_range_do_not_wrap() {
        assert_eq!(pack([usize::MAX, 1], [usize::MAX], 10), (1, 0));
    }
}
