//! How much is made at a time where the whole would take too much memory, or fall out of the processor's cache.

use std::sync::OnceLock;

/// Sizes of pieces. Results do not depend on them beyond the last bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// Scores of attention in the compressed form that are in memory at a time.
    pub scores: i64,
    /// Earlier keys that are expanded or widened at a time, so that a long sequence needs no more memory than a short one.
    pub earlier_keys: i64,
    /// Rows that go through a feed-forward network together.
    pub mlp_rows: i64,
    /// Elements of a weight that are widened or expanded at a time.
    pub weight_elements: i64,
}

impl Default for Pieces {
    /// Those of real machines: 64 MiB of scores, and 8 MiB of a weight as float32, so that the product finds it in the cache.
    fn default() -> Self {
        Self { scores: 16 << 20, earlier_keys: 4096, mlp_rows: 2048, weight_elements: 2 << 20 }
    }
}

static IN_USE: OnceLock<Pieces> = OnceLock::new();

impl Pieces {
    /// The sizes in use.
    pub(crate) fn in_use() -> &'static Self {
        IN_USE.get_or_init(Self::default)
    }

    /// Has this process use these sizes: a test makes every loop run many times on a tiny model.
    ///
    /// # Panics
    /// When others are in use already.
    #[doc(hidden)]
    pub fn use_everywhere(self) {
        assert_eq!(IN_USE.get_or_init(|| self), &self, "other sizes are in use");
    }
}
