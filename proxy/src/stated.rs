//! What a reply says of the length of its prompts.

use serde::Deserialize;

#[derive(Deserialize)]
struct Reply {
    meta_info: Option<Counts>,
    usage: Option<Counts>,
}

#[derive(Deserialize)]
struct Counts {
    prompt_tokens: Option<usize>,
}

/// The tokens of each of `count` prompts, in SGLang's or OpenAI's form. `None` where the reply does not say it of each.
pub fn prompt_tokens(reply: &[u8], count: usize) -> Option<Vec<usize>> {
    if reply.trim_ascii_start().starts_with(b"[") {
        let replies: Vec<Reply> = serde_json::from_slice(reply).ok()?;
        let all: Vec<usize> =
            replies.iter().map(|reply| reply.meta_info.as_ref()?.prompt_tokens).collect::<Option<_>>()?;
        // With several samples of each prompt they follow each other.
        let samples =
            all.len().checked_div(count).filter(|samples| *samples > 0 && samples * count == all.len())?;
        return Some(all.into_iter().step_by(samples).collect());
    }
    let reply: Reply = serde_json::from_slice(reply).ok()?;
    let tokens = reply.meta_info.or(reply.usage)?.prompt_tokens?;
    // The usage of a batch is a sum.
    (count == 1).then(|| vec![tokens])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_read() {
        let read = |text: &str, count| prompt_tokens(text.as_bytes(), count);
        assert_eq!(read(r#"{"text":"a","meta_info":{"id":"x","prompt_tokens":3}}"#, 1), Some(vec![3]));
        assert_eq!(read(r#"{"usage":{"prompt_tokens":4,"total_tokens":5}}"#, 1), Some(vec![4]));
        let batch = r#" [{"meta_info":{"prompt_tokens":1}},{"meta_info":{"prompt_tokens":2}}]"#;
        assert_eq!(read(batch, 2), Some(vec![1, 2]));
        assert_eq!(read(batch, 1), Some(vec![1]));
        assert_eq!(read(batch, 3), None);
        assert_eq!(read(r#"{"usage":{"prompt_tokens":4}}"#, 2), None);
        assert_eq!(read("{}", 1), None);
        assert_eq!(read("not json", 1), None);
    }
}
