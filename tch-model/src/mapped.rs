//! Tensors over mapped files: the crate's only `unsafe`.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use memmap2::{Advice, Mmap};
use tch::{Device, Kind, TchError, Tensor};

/// A weight. It may lie in a mapped file, which stays mapped as long as this exists; so borrow the tensor, and never
/// keep a shallow clone of it beyond this.
#[derive(Debug)]
pub(crate) struct Parameter {
    // The order matters: fields are dropped from the top, and the tensor must not outlive its memory.
    tensor: Tensor,
    file: Option<Arc<Mmap>>,
}

impl Parameter {
    /// Over the bytes `range` of `file`, without copying them: `None` where they are out of bounds, are not aligned for
    /// `kind`, or are not as many as `shape` needs.
    pub(crate) fn over(
        file: &Arc<Mmap>,
        range: std::ops::Range<usize>,
        shape: &[i64],
        kind: Kind,
    ) -> Result<Option<Self>, TchError> {
        let size = kind.elt_size_in_bytes();
        let elements = shape
            .iter()
            .try_fold(1usize, |elements, &dimension| elements.checked_mul(usize::try_from(dimension).ok()?));
        let Some(bytes) = file.get(range) else { return Ok(None) };
        let whole = elements.and_then(|elements| elements.checked_mul(size)) == Some(bytes.len());
        if !whole || !bytes.as_ptr().addr().is_multiple_of(size) {
            return Ok(None);
        }
        // SAFETY: the pointer is to `bytes.len()` readable bytes, checked above to be aligned and as many as the shape
        // has; `file` keeps them mapped at least as long as the tensor, see the order of the fields. The map is read-only:
        // nothing in this crate writes to a weight. Every bit pattern is a number.
        let tensor = unsafe { Tensor::f_from_blob(bytes.as_ptr(), shape, &[], kind, Device::Cpu)? };
        Ok(Some(Self { tensor, file: Some(Arc::clone(file)) }))
    }

    /// One that owns its memory.
    pub(crate) fn owned(tensor: Tensor) -> Self {
        Self { tensor, file: None }
    }

    /// What stands for a weight while a checkpoint is only looked through.
    pub(crate) fn nothing() -> Self {
        Self::owned(Tensor::new())
    }

    /// The same weight once more.
    pub(crate) fn share(&self) -> Self {
        Self { tensor: self.tensor.shallow_clone(), file: self.file.clone() }
    }

    /// Whether the weight lies in a mapped file.
    pub(crate) fn is_mapped(&self) -> bool {
        self.file.is_some()
    }
}

impl Deref for Parameter {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

/// Maps a file of weights for reading, and asks for it to be read ahead.
pub(crate) fn map(path: &Path) -> io::Result<Arc<Mmap>> {
    let file = File::open(path)?;
    // SAFETY: sound as long as nobody shortens or rewrites the file meanwhile. Checkpoints are written once and served
    // many times, and README says that one must not be changed while it is served.
    let map = unsafe { Mmap::map(&file)? };
    // Advice only: a file system that cannot read ahead is slower, not wrong.
    if let Err(error) = map.advise(Advice::WillNeed) {
        tracing::debug!(path = %path.display(), %error, "the system takes no advice on this file");
    }
    Ok(Arc::new(map))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: &[u8]) -> Arc<Mmap> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        std::fs::write(&path, bytes).unwrap();
        map(&path).unwrap()
    }

    #[test]
    fn a_parameter_reads_the_file_after_everyone_else_let_go_of_it() {
        let bytes: Vec<u8> = [1f32, 2.0, 3.0, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        let file = file(&bytes);
        let parameter = Parameter::over(&file, 4..16, &[3], Kind::Float).unwrap().unwrap();
        let shared = parameter.share();
        drop((file, parameter));
        assert!(shared.is_mapped());
        assert_eq!(Vec::<f32>::try_from(&*shared).unwrap(), [2.0, 3.0, 4.0]);
    }

    #[test]
    fn what_does_not_fit_or_is_not_aligned_is_not_mapped() {
        let file = file(&[0; 16]);
        assert!(Parameter::over(&file, 2..10, &[2], Kind::Float).unwrap().is_none());
        assert!(Parameter::over(&file, 0..16, &[3], Kind::Float).unwrap().is_none());
        assert!(Parameter::over(&file, 8..20, &[3], Kind::Float).unwrap().is_none());
        assert!(Parameter::over(&file, 0..16, &[-4], Kind::Float).unwrap().is_none());
        assert!(Parameter::over(&file, 2..10, &[4], Kind::BFloat16).unwrap().is_some());
    }
}
