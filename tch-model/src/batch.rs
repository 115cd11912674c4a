//! Sequences packed one behind the other, and the tiles a step is computed in.

use crate::{ForwardError, Sequence};

/// The layout of one step: every sequence's rows behind those of the one before, without padding.
pub(crate) struct Batch {
    /// The first row of each sequence, and the number of rows of the step behind the last.
    starts: Vec<i64>,
    /// How many tokens of each sequence earlier passes have run.
    past: Vec<i64>,
}

/// A run of packed rows that goes through a layer together. It may begin and end inside a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tile {
    /// Its first packed row.
    pub(crate) first: i64,
    /// How many rows it has.
    pub(crate) rows: i64,
    /// The sequences it touches.
    pub(crate) segments: Vec<Segment>,
}

/// The rows that a tile and a sequence have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Which sequence.
    pub(crate) sequence: usize,
    /// Packed row of the first row in common.
    pub(crate) first: i64,
    /// How many rows they have in common.
    pub(crate) rows: i64,
    /// Place of the first one among its sequence's rows of this step: so many of them lie in earlier tiles.
    pub(crate) position: i64,
}

impl Batch {
    /// Lays out the sequences, after checking that the model can run each of them.
    pub(crate) fn new(
        sequences: &[Sequence<'_>],
        vocab_size: i64,
        max_positions: i64,
    ) -> Result<Self, ForwardError> {
        let mut starts = vec![0];
        let mut past = Vec::with_capacity(sequences.len());
        let mut end = 0;
        for (sequence, of) in sequences.iter().enumerate() {
            let tokens = of.token_ids.len();
            if tokens == 0 {
                return Err(ForwardError::Empty { sequence });
            }
            let cached = of.cache.as_ref().map_or(0, |cache| cache.len());
            if i64::try_from(cached + tokens).map_or(true, |tokens| tokens > max_positions) {
                return Err(ForwardError::TooLong {
                    sequence,
                    tokens: cached + tokens,
                    limit: max_positions,
                });
            }
            let outside = |&token: &i64| !(0..vocab_size).contains(&token);
            if let Some(position) = of.token_ids.iter().position(outside) {
                let token = of.token_ids[position];
                return Err(ForwardError::Token { sequence, position, token, vocab_size });
            }
            if let Some(scoring) = &of.scoring {
                scoring.check(sequence, tokens, vocab_size)?;
            }
            end += tokens as i64;
            starts.push(end);
            past.push(cached as i64);
        }
        Ok(Self { starts, past })
    }

    /// Rows of the whole step.
    pub(crate) fn rows(&self) -> i64 {
        self.starts[self.starts.len() - 1]
    }

    /// First row and number of rows of each sequence.
    pub(crate) fn sequences(&self) -> impl Iterator<Item = (i64, i64)> + '_ {
        self.starts.windows(2).map(|pair| (pair[0], pair[1] - pair[0]))
    }

    /// The position of every row in its sequence, counted from the sequence's first token.
    pub(crate) fn positions(&self) -> Vec<i64> {
        let rows = self.sequences().zip(&self.past);
        rows.flat_map(|((_, rows), &past)| past..past + rows).collect()
    }

    /// The rows in tiles of `tile_rows`, the last one perhaps shorter.
    pub(crate) fn tiles(&self, tile_rows: i64) -> Vec<Tile> {
        let mut tiles = Vec::new();
        let mut sequence = 0;
        let mut first = 0;
        while first < self.rows() {
            let end = (first + tile_rows).min(self.rows());
            let mut segments = Vec::new();
            let mut row = first;
            while row < end {
                let (start, next) = (self.starts[sequence], self.starts[sequence + 1]);
                let rows = next.min(end) - row;
                segments.push(Segment { sequence, first: row, rows, position: row - start });
                row += rows;
                if row == next {
                    sequence += 1;
                }
            }
            tiles.push(Tile { first, rows: end - first, segments });
            first = end;
        }
        tiles
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn batch(lengths: &[usize]) -> Batch {
        let ids: Vec<Vec<i64>> = lengths.iter().map(|&length| vec![0; length]).collect();
        let sequences: Vec<_> = ids.iter().map(|ids| Sequence::new(ids)).collect();
        Batch::new(&sequences, 1, 1_000_000).unwrap()
    }

    #[test]
    fn a_tile_may_split_a_sequence() {
        let tiles = batch(&[2, 5, 1]).tiles(4);
        assert_eq!(
            tiles,
            [
                Tile {
                    first: 0,
                    rows: 4,
                    segments: vec![
                        Segment { sequence: 0, first: 0, rows: 2, position: 0 },
                        Segment { sequence: 1, first: 2, rows: 2, position: 0 },
                    ]
                },
                Tile {
                    first: 4,
                    rows: 4,
                    segments: vec![
                        Segment { sequence: 1, first: 4, rows: 3, position: 2 },
                        Segment { sequence: 2, first: 7, rows: 1, position: 0 },
                    ]
                },
            ]
        );
    }

    proptest! {
        #[test]
        fn tiles_cover_every_row_of_every_sequence_once_and_in_order(
            lengths in prop::collection::vec(1..40usize, 0..12), tile_rows in 1..60i64,
        ) {
            let batch = batch(&lengths);
            let mut next = vec![0; lengths.len()];
            let mut row = 0;
            for tile in batch.tiles(tile_rows) {
                prop_assert_eq!(tile.first, row);
                prop_assert!(tile.rows > 0 && tile.rows <= tile_rows);
                for segment in tile.segments {
                    prop_assert_eq!(segment.first, row);
                    prop_assert_eq!(segment.position, next[segment.sequence]);
                    prop_assert!(segment.rows > 0);
                    next[segment.sequence] += segment.rows;
                    row += segment.rows;
                }
                prop_assert_eq!(tile.first + tile.rows, row);
            }
            let lengths: Vec<i64> = lengths.into_iter().map(|length| length as i64).collect();
            prop_assert_eq!(next, lengths);
        }
    }
}
