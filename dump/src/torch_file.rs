//! Files that `torch.load` reads: a ZIP archive of stored entries around a pickle.
//!
//! `tch` can only write TorchScript archives, which trainers' loaders refuse, so the container is written here: entries
//! `<root>/data.pkl`, `<root>/byteorder`, `<root>/data/<n>`, `<root>/version`, all uncompressed, each tensor's bytes
//! aligned to 64 so that `torch.load(mmap=True)` maps them in place, ZIP64 where a size or offset asks for it. The pickle
//! is protocol 2: a dict whose tensors are calls of `torch._utils._rebuild_tensor_v2`.

mod pickle;

use std::io::{self, Seek, Write};

use zip::CompressionMethod;
use zip::write::{SimpleFileOptions, ZipWriter};

use pickle::Pickle;

/// Name of the folder inside the archive. PyTorch takes the file's stem; any name is read.
const ROOT: &str = "archive";
/// PyTorch aligns storages to this many bytes.
const ALIGNMENT: u16 = 64;

/// Element type of a tensor in the file, after PyTorch's storage classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// `torch.bfloat16`.
    BFloat16,
    /// `torch.float16`.
    Half,
    /// `torch.float32`.
    Float,
    /// `torch.int64`.
    Long,
    /// `torch.bool`, one byte an element.
    Bool,
}

impl Storage {
    fn class(self) -> &'static str {
        match self {
            Self::BFloat16 => "BFloat16Storage",
            Self::Half => "HalfStorage",
            Self::Float => "FloatStorage",
            Self::Long => "LongStorage",
            Self::Bool => "BoolStorage",
        }
    }

    fn size(self) -> usize {
        match self {
            Self::BFloat16 | Self::Half => 2,
            Self::Float => 4,
            Self::Long => 8,
            Self::Bool => 1,
        }
    }
}

/// Writes one file that `torch.load` gives back as a dict of tensors and strings.
///
/// Tensor data goes to the writer as it comes, so memory use does not grow with the file; the pickle, which the reader
/// finds by name, is written last.
pub struct TorchFile<W: Write + Seek> {
    zip: ZipWriter<W>,
    pickle: Pickle,
    tensors: usize,
}

impl<W: Write + Seek> TorchFile<W> {
    /// A file whose bytes go to `writer`.
    pub fn new(writer: W) -> Self {
        Self { zip: ZipWriter::new(writer), pickle: Pickle::dict(), tensors: 0 }
    }

    /// Adds the tensor `key` of `shape`, whose row-major little-endian elements are the bytes of `chunks`, in order.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the bytes are not as many as the shape asks for; else the writer's errors.
    pub fn tensor<'a>(
        &mut self,
        key: &str,
        storage: Storage,
        shape: &[usize],
        chunks: impl IntoIterator<Item = &'a [u8]>,
    ) -> io::Result<()> {
        let name = self.data(key, storage, shape, chunks)?;
        self.pickle.tensor(key, storage.class(), &name, shape);
        Ok(())
    }

    /// Writes the bytes of a tensor as an entry of its own and returns the entry's name.
    fn data<'a>(
        &mut self,
        key: &str,
        storage: Storage,
        shape: &[usize],
        chunks: impl IntoIterator<Item = &'a [u8]>,
    ) -> io::Result<String> {
        let expected = shape.iter().product::<usize>() * storage.size();
        let name = self.tensors.to_string();
        self.tensors += 1;
        self.start(&format!("data/{name}"), expected as u64)?;
        let mut written = 0;
        for chunk in chunks {
            self.zip.write_all(chunk)?;
            written += chunk.len();
        }
        if written != expected {
            let what = format!("tensor `{key}` of shape {shape:?} is {expected} bytes, {written} were given");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        Ok(name)
    }

    /// Adds the string `value` under `key`.
    pub fn string(&mut self, key: &str, value: &str) {
        self.pickle.string(key, value);
    }

    /// Completes the file and gives back the writer.
    ///
    /// # Errors
    /// The writer's.
    pub fn finish(mut self) -> io::Result<W> {
        let pickle = std::mem::replace(&mut self.pickle, Pickle::dict()).finish_dict();
        self.close(&pickle)
    }

    /// Writes what makes an archive of the entries that are there, and gives back the writer.
    fn close(mut self, pickle: &[u8]) -> io::Result<W> {
        for (name, contents) in [("data.pkl", pickle), ("byteorder", b"little"), ("version", b"3\n")] {
            self.start(name, contents.len() as u64)?;
            self.zip.write_all(contents)?;
        }
        Ok(self.zip.finish()?)
    }

    /// Begins the entry `name` of `len` bytes.
    fn start(&mut self, name: &str, len: u64) -> io::Result<()> {
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Stored)
            // Room for a 64-bit size must be made before the data is written.
            .large_file(len >= u64::from(u32::MAX))
            .with_alignment(ALIGNMENT);
        Ok(self.zip.start_file(format!("{ROOT}/{name}"), options)?)
    }
}

/// Writes one file that `torch.load` gives back as a single tensor, and returns the writer.
///
/// # Errors
/// As [`TorchFile::tensor`].
pub fn write_tensor<'a, W: Write + Seek>(
    writer: W,
    storage: Storage,
    shape: &[usize],
    chunks: impl IntoIterator<Item = &'a [u8]>,
) -> io::Result<W> {
    let mut file = TorchFile::new(writer);
    let name = file.data("the tensor", storage, shape, chunks)?;
    file.close(&Pickle::tensor_alone(storage.class(), &name, shape))
}
