//! Where the text model is among a checkpoint's names, and which of the others have a right to be there.

/// What the names of the body's and the head's tensors begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Names {
    /// Ends before `layers.`, `embed_tokens.` and `norm.`.
    pub(crate) body: &'static str,
    /// Ends before `weight` of the output head.
    pub(crate) head: &'static str,
}

/// The published names first: they are what a checkpoint without any of these is told that it lacks.
const BODIES: [&str; 5] = ["model.", "language_model.model.", "language_model.", "model.language_model.", ""];
const HEADS: [&str; 2] = ["lm_head.", "language_model.lm_head."];

/// Towers and projectors of models that see.
const VISION: [&str; 9] = [
    "mm_projector.",
    "model.mm_projector.",
    "model.multi_modal_projector.",
    "model.vision_tower.",
    "model.visual.",
    "multi_modal_projector.",
    "vision_model.",
    "vision_tower.",
    "visual.",
];

/// Last parts of the names of factors for activations and caches, which are not quantised here.
const ACTIVATIONS: [&str; 7] =
    ["input_global_scale", "input_scale", "k_scale", "kv_scale", "output_scale", "q_scale", "v_scale"];

/// What a tensor that nobody asked for is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Unused {
    /// Of a layer behind the last, for multi-token prediction.
    Prediction,
    /// Of a part that sees.
    Vision,
    /// A factor for activations, or rotary frequencies, which are computed; or a head beside the embedding it is tied to.
    Implied,
    /// In the text model, which the config then does not describe.
    Text,
    /// Elsewhere.
    Elsewhere,
}

impl Names {
    /// Finds the model by its embedding.
    ///
    /// # Errors
    /// When there are two.
    pub(crate) fn find(has: impl Fn(&str) -> bool) -> Result<Self, String> {
        let one = |prefixes: &[&'static str], name: &str| {
            let found: Vec<&str> =
                prefixes.iter().filter(|&&prefix| has(&format!("{prefix}{name}"))).copied().collect();
            match found[..] {
                [] => Ok(prefixes[0]),
                [prefix] => Ok(prefix),
                [first, second, ..] => {
                    Err(format!("both `{first}{name}` and `{second}{name}` are there: which model is meant?"))
                }
            }
        };
        Ok(Self { body: one(&BODIES, "embed_tokens.weight")?, head: one(&HEADS, "weight")? })
    }

    /// What the tensor `name` is, if a model of so many layers did not ask for it.
    pub(crate) fn unused(&self, name: &str, num_layers: i64, tied: bool) -> Unused {
        let last = name.rsplit('.').next().unwrap_or(name);
        let in_body = (!self.body.is_empty()).then(|| name.strip_prefix(self.body)).flatten();
        if in_body.is_none() && VISION.iter().any(|prefix| name.starts_with(prefix)) {
            return Unused::Vision;
        }
        let in_body = in_body.or(self.body.is_empty().then_some(name));
        let layer = in_body.and_then(|rest| rest.strip_prefix("layers.")?.split('.').next()?.parse().ok());
        if layer.is_some_and(|layer: i64| layer >= num_layers) {
            return Unused::Prediction;
        }
        let in_head = name.starts_with(self.head);
        if ACTIVATIONS.contains(&last) || name.ends_with(".rotary_emb.inv_freq") || (tied && in_head) {
            return Unused::Implied;
        }
        if in_body.is_some() || in_head { Unused::Text } else { Unused::Elsewhere }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(names: &[&str]) -> Result<Names, String> {
        Names::find(|name| names.contains(&name))
    }

    #[test]
    fn the_model_is_found_under_every_prefix_it_is_published_with() {
        let names = |body, head| Ok(Names { body, head });
        assert_eq!(find(&["model.embed_tokens.weight", "lm_head.weight"]), names("model.", "lm_head."));
        let wrapped = find(&["language_model.model.embed_tokens.weight", "language_model.lm_head.weight"]);
        assert_eq!(wrapped, names("language_model.model.", "language_model.lm_head."));
        let shortened = find(&["language_model.embed_tokens.weight", "lm_head.weight"]);
        assert_eq!(shortened, names("language_model.", "lm_head."));
        assert_eq!(find(&["embed_tokens.weight"]), names("", "lm_head."));
        assert_eq!(find(&[]), names("model.", "lm_head."));
    }

    #[test]
    fn two_models_in_one_checkpoint_are_refused() {
        let error = find(&["model.embed_tokens.weight", "language_model.embed_tokens.weight"]).unwrap_err();
        assert!(error.contains("`language_model.embed_tokens.weight`"), "{error}");
    }

    #[test]
    fn what_nobody_asked_for_is_told_apart() {
        let plain = Names { body: "model.", head: "lm_head." };
        let unused = |name| plain.unused(name, 4, false);
        // Whatever the model's depth: 61 is no magic number.
        assert_eq!(unused("model.layers.4.eh_proj.weight"), Unused::Prediction);
        assert_eq!(unused("model.layers.61.mlp.gate.weight"), Unused::Prediction);
        assert_eq!(unused("model.layers.3.self_attn.q_norm.weight"), Unused::Text);
        assert_eq!(unused("model.layers.3.self_attn.o_proj.bias"), Unused::Text);
        assert_eq!(unused("model.layers.0.self_attn.rotary_emb.inv_freq"), Unused::Implied);
        assert_eq!(unused("model.layers.0.mlp.down_proj.input_scale"), Unused::Implied);
        assert_eq!(unused("lm_head.weight"), Unused::Text);
        assert_eq!(plain.unused("lm_head.weight", 4, true), Unused::Implied);
        assert_eq!(unused("vision_tower.encoder.blocks.0.wqkv.weight"), Unused::Vision);
        assert_eq!(unused("draft.layers.0.weight"), Unused::Elsewhere);
        let wrapped = Names { body: "language_model.model.", head: "language_model.lm_head." };
        assert_eq!(wrapped.unused("mm_projector.linear_1.weight", 4, false), Unused::Vision);
        assert_eq!(wrapped.unused("language_model.model.layers.4.x", 4, false), Unused::Prediction);
        assert_eq!(wrapped.unused("language_model.model.extra", 4, false), Unused::Text);
    }
}
