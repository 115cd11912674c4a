//! Finished files: written so that they survive a power cut, and known again later.

use std::{
    collections::HashSet,
    fmt,
    fs::{self, File, Permissions},
    io::{self, BufWriter, Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::fs::{FileExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use xxhash_rust::xxh3::Xxh3Default;

/// Ends the name of a file that is still being written. It must not end as a trainer's files do: loaders take every file
/// with their suffix.
const TEMPORARY: &str = ".tmp";
const BLOCK: u64 = 4096;
/// Blocks of a file that the quick check reads.
const PROBED_BLOCKS: u64 = 10;
const BUFFER: usize = 1 << 20;

/// What a finished file is known by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// Length.
    pub bytes: u64,
    /// XXH3-128 of its first, last and some blocks between: cheap to check for each of a million files, and finds a
    /// file that is cut short, full of zeros or another sample's.
    pub probe: String,
    /// XXH3-128 of all of it.
    pub hash: String,
}

/// How closely a file is looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Depth {
    /// Length and some blocks: about 40 KiB read from each file.
    #[default]
    Quick,
    /// Every byte.
    Full,
}

/// Why a file is not the one that was written.
#[derive(Debug)]
pub enum Damage {
    /// It is gone.
    Missing,
    /// It cannot be read.
    Unreadable(io::Error),
    /// It has another length.
    Length {
        /// Bytes there are.
        found: u64,
        /// Bytes there were.
        recorded: u64,
    },
    /// Its bytes are others.
    Content,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("is missing"),
            Self::Unreadable(error) => write!(f, "cannot be read: {error}"),
            Self::Length { found, recorded } => write!(f, "is {found} bytes long, {recorded} were written"),
            Self::Content => f.write_str("does not hold what was written"),
        }
    }
}

impl Fingerprint {
    fn take(file: &mut File) -> io::Result<Self> {
        let bytes = file.metadata()?.len();
        Ok(Self { bytes, probe: probe(file, bytes)?, hash: hash(file)? })
    }

    /// Compares the file at `path`.
    ///
    /// # Errors
    /// The first difference found.
    pub fn check(&self, path: &Path, depth: Depth) -> Result<(), Damage> {
        let unreadable = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Damage::Missing,
            _ => Damage::Unreadable(error),
        };
        let mut file = File::open(path).map_err(unreadable)?;
        let found = file.metadata().map_err(unreadable)?.len();
        if found != self.bytes {
            return Err(Damage::Length { found, recorded: self.bytes });
        }
        let same = match depth {
            Depth::Quick => probe(&file, found).map_err(unreadable)? == self.probe,
            Depth::Full => hash(&mut file).map_err(unreadable)? == self.hash,
        };
        if same { Ok(()) } else { Err(Damage::Content) }
    }
}

/// Hash of the first block, the last, and some at even distances between.
fn probe(file: &File, bytes: u64) -> io::Result<String> {
    let mut hasher = Xxh3Default::new();
    let mut block = [0; BLOCK as usize];
    let last = bytes.saturating_sub(BLOCK);
    let (mut end, steps) = (0, PROBED_BLOCKS - 1);
    for step in 0..=steps {
        // Two products instead of one, so that no length overflows.
        let start = (last / steps * step + last % steps * step / steps).max(end);
        let length = BLOCK.min(bytes - start) as usize;
        file.read_exact_at(&mut block[..length], start)?;
        hasher.update(&block[..length]);
        end = start + length as u64;
    }
    Ok(format!("{:032x}", hasher.digest128()))
}

fn hash(file: &mut File) -> io::Result<String> {
    file.seek(SeekFrom::Start(0))?;
    let mut hasher = Xxh3Default::new();
    let mut buffer = vec![0; BUFFER];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(format!("{:032x}", hasher.digest128())),
            Ok(length) => hasher.update(&buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// The directory that finished files go to.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    /// Folders known to be there and to survive a power cut.
    folders: Mutex<HashSet<PathBuf>>,
}

impl Store {
    /// Files below `root`, which is there.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), folders: Mutex::default() }
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Writes the file `relative` with `fill`, replacing one that is there: under a temporary name, synced, renamed, the
    /// folder synced. Once this returns, the file is there after a power cut; if it fails, nothing is left of it.
    ///
    /// # Errors
    /// Those of `fill`, and of the file system.
    pub fn write<E: From<io::Error>>(
        &self,
        relative: &Path,
        fill: impl FnOnce(&mut BufWriter<File>) -> Result<(), E>,
    ) -> Result<Fingerprint, E> {
        let path = self.root.join(relative);
        let folder = path.parent().expect("a file below the root has a folder");
        self.create_folder(folder)?;
        let name = path.file_name().expect("a file has a name").to_string_lossy();
        let temporary = tempfile::Builder::new()
            .prefix(&format!(".{name}."))
            .suffix(TEMPORARY)
            // As any program's new file: the trainer may run as another user. The umask still counts.
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(folder)?;
        let (file, temporary) = temporary.into_parts();
        let mut writer = BufWriter::with_capacity(BUFFER, file);
        fill(&mut writer)?;
        writer.flush()?;
        let mut file = writer.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?; // contents first,
        let fingerprint = Fingerprint::take(&mut file)?;
        temporary.persist(&path).map_err(|error| error.error)?; // then the name,
        File::open(folder)?.sync_all()?; // then the folder's entry.
        Ok(fingerprint)
    }

    /// Makes `folder` and those above it up to the root, each durable.
    fn create_folder(&self, folder: &Path) -> io::Result<()> {
        let mut known = self.folders.lock().unwrap_or_else(PoisonError::into_inner);
        if known.contains(folder) {
            return Ok(());
        }
        let mut missing = Vec::new();
        let mut at = folder;
        while at != self.root && !at.is_dir() {
            missing.push(at);
            at = at.parent().expect("the folder is below the root");
        }
        for folder in missing.into_iter().rev() {
            match fs::create_dir(folder) {
                Ok(()) => File::open(folder.parent().expect("below the root"))?.sync_all()?,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        known.insert(folder.to_owned());
        Ok(())
    }

    /// Removes what writes left behind that a crash cut off. Only the lock's holder may call it.
    ///
    /// # Errors
    /// If a folder cannot be read or a file not removed.
    pub fn remove_temporaries(&self) -> io::Result<usize> {
        let mut removed = 0;
        for path in self.files()? {
            let name = path.file_name().expect("a file has a name").to_string_lossy();
            if name.starts_with('.') && name.ends_with(TEMPORARY) {
                fs::remove_file(&path)?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    /// Every file one folder below the root.
    ///
    /// # Errors
    /// If a folder cannot be read.
    pub fn files(&self) -> io::Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for folder in fs::read_dir(&self.root)? {
            let folder = folder?;
            if !folder.file_type()?.is_dir() {
                continue;
            }
            for file in fs::read_dir(folder.path())? {
                let file = file?;
                if file.file_type()?.is_file() {
                    files.push(file.path());
                }
            }
        }
        files.sort();
        Ok(files)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stored(content: &[u8]) -> (tempfile::TempDir, PathBuf, Fingerprint) {
        let root = tempfile::tempdir().unwrap();
        let store = Store::new(root.path());
        let fingerprint =
            store.write::<io::Error>(Path::new("a/b.ckpt"), |file| file.write_all(content)).unwrap();
        let path = root.path().join("a/b.ckpt");
        (root, path, fingerprint)
    }

    #[test]
    fn a_file_is_whole_under_its_name_and_nothing_else_is_left() {
        let (root, path, fingerprint) = stored(b"content");
        assert_eq!(fs::read(&path).unwrap(), b"content");
        assert_eq!(Store::new(root.path()).files().unwrap(), std::slice::from_ref(&path));
        assert_eq!(fingerprint.bytes, 7);
        fingerprint.check(&path, Depth::Quick).unwrap();
        fingerprint.check(&path, Depth::Full).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o600, 0o600);
    }

    #[test]
    fn a_write_that_fails_leaves_what_was_there() {
        let (root, path, _) = stored(b"old");
        let store = Store::new(root.path());
        let error = store.write::<io::Error>(Path::new("a/b.ckpt"), |file| {
            file.write_all(b"half")?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        });
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(store.files().unwrap(), [path]);
    }

    #[test]
    fn what_a_crash_left_is_removed_and_nothing_else() {
        let (root, path, _) = stored(b"x");
        fs::write(root.path().join("a/.b.ckpt.Xy12.tmp"), b"half").unwrap();
        fs::write(root.path().join("a/notes.tmp"), b"the user's").unwrap();
        let store = Store::new(root.path());
        assert_eq!(store.remove_temporaries().unwrap(), 1);
        assert_eq!(store.files().unwrap(), [path, root.path().join("a/notes.tmp")]);
    }

    #[test]
    fn a_missing_file_is_told_from_a_changed_one() {
        let (_root, path, fingerprint) = stored(&[7; 50_000]);
        fs::write(&path, [0; 50_000]).unwrap();
        assert!(matches!(fingerprint.check(&path, Depth::Quick), Err(Damage::Content)));
        fs::write(&path, b"").unwrap();
        let error = fingerprint.check(&path, Depth::Quick).unwrap_err();
        assert_eq!(error.to_string(), "is 0 bytes long, 50000 were written");
        fs::remove_file(&path).unwrap();
        assert!(matches!(fingerprint.check(&path, Depth::Quick), Err(Damage::Missing)));
    }

    #[test]
    fn a_changed_byte_in_any_place_is_found_by_the_full_check() {
        let (_root, path, fingerprint) = stored(&[7; 100_000]);
        let mut bytes = fs::read(&path).unwrap();
        bytes[6000] ^= 1;
        fs::write(&path, &bytes).unwrap();
        fingerprint.check(&path, Depth::Quick).unwrap();
        assert!(matches!(fingerprint.check(&path, Depth::Full), Err(Damage::Content)));
    }

    proptest! {
        #[test]
        fn a_file_of_any_length_is_recognised_and_zeros_are_not(length in 1usize..200_000) {
            let content: Vec<u8> = (0..length).map(|at| (at % 251) as u8 + 1).collect();
            let (_root, path, fingerprint) = stored(&content);
            prop_assert!(fingerprint.check(&path, Depth::Quick).is_ok());
            fs::write(&path, vec![0; length]).unwrap();
            prop_assert!(fingerprint.check(&path, Depth::Quick).is_err());
        }
    }
}
