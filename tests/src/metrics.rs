//! Reading Prometheus text.

use std::collections::BTreeMap;

use crate::client::Client;

/// One scrape of `/metrics`.
#[derive(Clone, Debug)]
pub struct Scrape {
    series: BTreeMap<Series, f64>,
}

/// A name and its labels, sorted.
type Series = (String, BTreeMap<String, String>);

impl Scrape {
    /// Scrapes `/metrics`.
    pub async fn of(client: &Client) -> Self {
        Self::parse(&client.get("/metrics").await.expect(200).text())
    }

    /// Parses the text exposition format.
    ///
    /// # Panics
    /// If a line is not a comment and not a sample.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let series = lines.map(|line| parse_line(line).unwrap_or_else(|| panic!("not a sample: {line}")));
        Self { series: series.collect() }
    }

    /// Names of all series, each once.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.series.keys().map(|(name, _)| name.as_str()).collect();
        names.dedup();
        names
    }

    /// Number of series.
    pub fn len(&self) -> usize {
        self.series.len()
    }

    /// Whether nothing is exported.
    pub fn is_empty(&self) -> bool {
        self.series.is_empty()
    }

    /// All samples: name, labels, value.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &BTreeMap<String, String>, f64)> {
        self.series.iter().map(|((name, labels), value)| (name.as_str(), labels, *value))
    }

    /// The sum over all series of `name` that carry the given labels.
    ///
    /// # Panics
    /// If there is none: a misspelt name must not read as zero.
    #[track_caller]
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let carries = |have: &BTreeMap<String, String>| {
            labels.iter().all(|(key, value)| have.get(*key).is_some_and(|v| v == value))
        };
        let mut found = self.iter().filter(|(n, have, _)| *n == name && carries(have)).peekable();
        assert!(found.peek().is_some(), "no series `{name}` with {labels:?} among {:#?}", self.names());
        found.map(|(_, _, value)| value).sum()
    }
}

/// `name{label="value",…} number`, with an optional time stamp.
fn parse_line(line: &str) -> Option<(Series, f64)> {
    let end_of_name = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(end_of_name);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => parse_labels(rest)?,
        None => (BTreeMap::new(), rest),
    };
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(((name.to_owned(), labels), value))
}

/// What follows the opening brace: the labels, and what follows the closing brace.
fn parse_labels(mut rest: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut labels = BTreeMap::new();
    loop {
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (key, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next()? {
                (at, '"') => break at + 1,
                (_, '\\') => match chars.next()?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                (_, other) => value.push(other),
            }
        };
        labels.insert(key.to_owned(), value);
        rest = after[end..].strip_prefix(',').unwrap_or(&after[end..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_with_their_labels() {
        let scrape = Scrape::parse(concat!(
            "# HELP a_total Things.\n# TYPE a_total counter\n",
            "a_total{kind=\"x\",path=\"a,\\\"b\\\"}\"} 3\na_total{kind=\"y\",path=\"\"} 4\n\nb 1.5e3\nc{le=\"+Inf\"} +Inf\n",
        ));
        assert_eq!(scrape.sum("a_total", &[]), 7.0);
        assert_eq!(scrape.sum("a_total", &[("path", "a,\"b\"}")]), 3.0);
        assert_eq!(scrape.sum("b", &[]), 1500.0);
        assert_eq!(scrape.names(), ["a_total", "b", "c"]);
    }

    #[test]
    #[should_panic(expected = "no series `a`")]
    fn a_misspelt_name_is_no_zero() {
        Scrape::parse("a_total 3\n").sum("a", &[]);
    }
}
