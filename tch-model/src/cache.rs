//! What later tokens attend to: the compressed keys and values of one sequence, of every layer.

use tch::{Device, Kind, Tensor};

/// The latent cache of one sequence: `kv_lora_rank + qk_rope_head_dim` numbers a token and layer, normed and rotated.
/// [`Model::new_cache`](crate::Model::new_cache) makes an empty one; a pass that is given it appends its tokens.
#[derive(Debug)]
pub struct KvCache {
    /// `[capacity, latent]` of each layer.
    layers: Vec<Tensor>,
    len: i64,
    /// Tokens that it is ever grown for ahead of need.
    limit: i64,
}

/// Rows of the smallest cache. Below that, growing would cost more than the memory.
const SMALLEST: i64 = 64;

impl KvCache {
    /// One without tokens, for layers on these devices and no more than `limit` tokens.
    pub(crate) fn new(devices: impl Iterator<Item = Device>, latent: i64, kind: Kind, limit: i64) -> Self {
        let layers = devices.map(|device| Tensor::empty([0, latent], (kind, device)));
        Self { layers: layers.collect(), len: 0, limit }
    }

    /// Tokens in it.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that it holds on to, which are more than its tokens fill.
    pub fn bytes(&self) -> u64 {
        self.layers.iter().map(|layer| (layer.numel() * layer.kind().elt_size_in_bytes()) as u64).sum()
    }

    /// Forgets all but the first `len` tokens.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn truncate(&mut self, len: usize) {
        assert!(len <= self.len(), "{len} of {} tokens", self.len);
        self.len = len as i64;
    }

    /// Makes room for `more` tokens behind those there are, and gives handles to the layers' rows.
    pub(crate) fn reserve(&mut self, more: i64) -> Vec<Tensor> {
        let needed = self.len + more;
        for layer in &mut self.layers {
            let (capacity, latent) = layer.size2().expect("rows of latents");
            if capacity < needed {
                // Half as much again, so that appending a token at a time copies each row a few times only.
                let capacity = needed.max(capacity + capacity / 2).max(SMALLEST).min(self.limit.max(needed));
                let larger = Tensor::empty([capacity, latent], (layer.kind(), layer.device()));
                larger.narrow(0, 0, self.len).copy_(&layer.narrow(0, 0, self.len));
                *layer = larger;
            }
        }
        self.layers.iter().map(Tensor::shallow_clone).collect()
    }

    /// The rows behind the first `len` that a pass has filled are tokens of the sequence now.
    pub(crate) fn extend(&mut self, more: i64) {
        self.len += more;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_grows_by_parts_keeps_its_rows_and_stays_within_its_limit() {
        let mut cache = KvCache::new([Device::Cpu; 2].into_iter(), 3, Kind::Float, 200);
        let mut grown = 0;
        for token in 0..200i64 {
            let before = cache.bytes();
            for layer in cache.reserve(1) {
                layer.get(token).copy_(&Tensor::full([3], token as f64, (Kind::Float, Device::Cpu)));
            }
            cache.extend(1);
            grown += usize::from(cache.bytes() != before);
        }
        assert_eq!((cache.len(), cache.bytes()), (200, 2 * 200 * 3 * 4));
        assert!(grown <= 4, "it grew {grown} times");
        for layer in cache.reserve(0) {
            let rows = Vec::<f32>::try_from(layer.select(1, 2)).unwrap();
            assert!(rows.iter().zip(0..).all(|(found, token)| *found == token as f32));
        }
        cache.truncate(7);
        assert_eq!(cache.len(), 7);
    }
}
