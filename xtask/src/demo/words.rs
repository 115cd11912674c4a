//! Numbers and command lines as people read them.

/// `85291` as `85,291`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A command line that stays within 80 columns where its words allow, broken before its flags as a shell accepts.
pub(crate) fn line_broken(line: &str) -> String {
    const WIDTH: usize = 78;
    let mut parts = line.split(" --");
    let mut text = parts.next().unwrap_or_default().to_owned();
    let mut column = text.len();
    for part in parts {
        if column + 3 + part.len() > WIDTH {
            text.push_str(" \\\n   ");
            column = 3;
        }
        text.push_str(" --");
        text.push_str(part);
        column += 3 + part.len();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_set_apart() {
        for (number, text) in
            [(0, "0"), (999, "999"), (1_000, "1,000"), (85_291, "85,291"), (1_234_567, "1,234,567")]
        {
            assert_eq!(count(number), text);
        }
    }

    #[test]
    fn a_long_command_is_broken_before_flags_and_stays_the_same_command() {
        let line = "target/release/tether-extract run --proxy http://127.0.0.1:40001 \
                    --data xtask/demo/samples.jsonl --out target/demo/out --format specforge --concurrency 32";
        let broken = line_broken(line);
        assert!(broken.lines().count() > 1 && broken.lines().all(|line| line.len() <= 80), "{broken}");
        assert_eq!(broken.replace(" \\\n   ", ""), line);
        assert_eq!(line_broken("short --flag"), "short --flag");
    }
}
