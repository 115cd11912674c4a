//! A checkpoint's tensors, by name.

mod checkpoint;
mod names;
mod table;

use std::cell::RefCell;
use std::collections::BTreeSet;

use safetensors::Dtype;
use tch::{Device, Kind, Tensor};

use crate::LoadError;
use crate::config::{Config, Modules, Scheme};
use crate::mapped::Parameter;
pub(crate) use checkpoint::Checkpoint;
use checkpoint::Entry;
use names::Names;
pub(crate) use names::Unused;
pub use table::{LoadRow, LoadTable};

/// Where in the checkpoint a layer's tensors are, and what they become.
///
/// A model is assembled twice: first by a handle that only notes what is absent or misshapen, so that all of it is
/// reported at once and before any weight is touched, then by one that loads.
pub(crate) struct Weights<'a> {
    source: &'a Source<'a>,
    prefix: String,
    device: Device,
}

/// What came of an assembly.
pub(crate) struct Assembled<'a> {
    /// Tensors nobody asked for.
    pub(crate) unused: Vec<(Unused, &'a str)>,
    pub(crate) table: LoadTable,
}

/// What all handles of one assembly share.
pub(crate) struct Source<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a Config,
    quantised: Option<(Scheme, Modules)>,
    kind: Kind,
    loading: bool,
    asked: RefCell<BTreeSet<String>>,
    problems: RefCell<Vec<String>>,
    table: RefCell<LoadTable>,
}

impl<'a> Source<'a> {
    /// A source for tensors of `kind`, on the CPU unless a handle says otherwise; unless `loading`, one that hands out
    /// empty tensors and takes notes.
    pub(crate) fn new(checkpoint: &'a Checkpoint, config: &'a Config, kind: Kind, loading: bool) -> Self {
        let quantised =
            config.quantisation.as_ref().map(|quantisation| (quantisation.scheme, quantisation.modules()));
        let (asked, problems, table) = (RefCell::default(), RefCell::default(), RefCell::default());
        Self { checkpoint, config, quantised, kind, loading, asked, problems, table }
    }

    /// The handle for the embedding, the layers and the final norm.
    pub(crate) fn body(&'a self) -> Weights<'a> {
        self.under(self.checkpoint.names.body)
    }

    /// The handle for the output head.
    pub(crate) fn head(&'a self) -> Weights<'a> {
        self.under(self.checkpoint.names.head)
    }

    /// The handle for what is under the whole name `prefix`.
    pub(crate) fn under(&'a self, prefix: &str) -> Weights<'a> {
        Weights { source: self, prefix: prefix.to_owned(), device: Device::Cpu }
    }

    /// Reports everything that was absent or misshapen, or in the text model and not asked for; else what else was not
    /// asked for, and what was loaded.
    pub(crate) fn finish(self) -> Result<Assembled<'a>, LoadError> {
        let (asked, mut problems) = (self.asked.into_inner(), self.problems.into_inner());
        let Config { num_hidden_layers, tie_word_embeddings, .. } = *self.config;
        let names = self.checkpoint.tensors.keys().map(String::as_str).filter(|name| !asked.contains(*name));
        let unused = names
            .map(|name| (self.checkpoint.names.unused(name, num_hidden_layers, tie_word_embeddings), name));
        let unused: Vec<_> = unused.collect();
        let in_text = unused.iter().filter(|(what, _)| *what == Unused::Text);
        problems.extend(
            in_text.map(|(_, name)| format!("`{name}` is not in the model that the config describes")),
        );
        match problems.is_empty() {
            true => Ok(Assembled { unused, table: self.table.into_inner() }),
            false => Err(LoadError::Tensors { problems }),
        }
    }
}

impl Weights<'_> {
    /// The handle for what is under `name`.
    pub(crate) fn sub(&self, name: impl std::fmt::Display) -> Self {
        Self { prefix: format!("{}{name}.", self.prefix), ..*self }
    }

    /// The same, for another device.
    pub(crate) fn on(&self, device: Device) -> Self {
        Self { source: self.source, prefix: self.prefix.clone(), device }
    }

    /// What the tensor `name` is stored as, if there is such a tensor.
    pub(crate) fn dtype(&self, name: &str) -> Option<Dtype> {
        self.entry(name).map(|entry| entry.dtype)
    }

    /// How this module must be stored by the config: `None` if plain.
    pub(crate) fn scheme(&self) -> Option<Scheme> {
        let (scheme, modules) = self.source.quantised.as_ref()?;
        modules.includes(&self.module_names()).then_some(*scheme)
    }

    /// Whether the config names this module as one that stays plain.
    pub(crate) fn is_ignored(&self) -> bool {
        let modules = self.source.quantised.as_ref().map(|(_, modules)| modules);
        modules.is_some_and(|modules| modules.ignores(&self.module_names()))
    }

    /// The names a config may know the module by: as it is called here, in a checkpoint of the text model alone, and in a
    /// wrapper. Tools that rename tensors do not always rename what the config lists.
    fn module_names(&self) -> [String; 3] {
        let Names { body, head } = self.source.checkpoint.names;
        let name = self.module();
        let alone = match (self.prefix.strip_prefix(head), name.strip_prefix(body)) {
            (Some(_), _) => "lm_head".to_owned(),
            (None, Some(rest)) => format!("model.{rest}"),
            (None, None) => name.to_owned(),
        };
        [name.to_owned(), format!("language_model.{alone}"), alone]
    }

    /// The module's whole name, for messages.
    pub(crate) fn module(&self) -> &str {
        self.prefix.trim_end_matches('.')
    }

    /// Notes what is wrong. Nothing is loaded once something was noted.
    pub(crate) fn refuse(&self, problem: String) {
        self.source.problems.borrow_mut().push(problem);
    }

    /// Whether this is the assembly that loads.
    pub(crate) fn is_loading(&self) -> bool {
        self.source.loading
    }

    /// The tensor `name`, which must have this shape, in the model's kind.
    pub(crate) fn get(&self, name: &str, shape: &[i64]) -> Result<Parameter, LoadError> {
        self.get_as(name, shape, self.source.kind)
    }

    /// The tensor `name` in a kind of its own.
    pub(crate) fn get_as(&self, name: &str, shape: &[i64], kind: Kind) -> Result<Parameter, LoadError> {
        let Some(entry) = self.checked(name, shape) else { return Ok(Parameter::nothing()) };
        let Some(stored_as) = kind_of(entry.dtype) else {
            let (name, found) = (self.path(name), entry.dtype);
            self.refuse(format!("`{name}` is {found:?}; F32, BF16, F16 and F64 can be read"));
            return Ok(Parameter::nothing());
        };
        match self.is_loading() {
            true => self.load(entry, entry.range.clone(), shape, stored_as, kind),
            false => Ok(Parameter::nothing()),
        }
    }

    /// Row `index` of the three-dimensional tensor `name`, of it the part `rows`, as a matrix in the model's kind.
    pub(crate) fn get_slice(
        &self,
        name: &str,
        shape: &[i64; 3],
        index: i64,
        rows: std::ops::Range<i64>,
    ) -> Result<Parameter, LoadError> {
        let Some(entry) = self.checked(name, shape) else { return Ok(Parameter::nothing()) };
        let Some(stored_as) = kind_of(entry.dtype) else {
            if index == 0 {
                let (name, found) = (self.path(name), entry.dtype);
                self.refuse(format!("`{name}` is {found:?}; F32, BF16, F16 and F64 can be read"));
            }
            return Ok(Parameter::nothing());
        };
        if !self.is_loading() {
            return Ok(Parameter::nothing());
        }
        // The whole tensor has as many bytes as its shape says: safetensors' reader checked that.
        let row = shape[2] as usize * stored_as.elt_size_in_bytes();
        let at = |first: i64| entry.range.start + (index * shape[1] + first) as usize * row;
        let range = at(rows.start)..at(rows.end);
        self.load(entry, range, &[rows.end - rows.start, shape[2]], stored_as, self.source.kind)
    }

    /// The bits of the tensor `name`, which must be stored as `dtype`, seen as numbers of `kind`, whose size must be that
    /// of the last dimension's elements as `shape` counts them.
    pub(crate) fn bits(
        &self,
        name: &str,
        dtype: Dtype,
        shape: &[i64],
        seen_as: (Kind, &[i64]),
    ) -> Result<Parameter, LoadError> {
        let Some(entry) = self.checked(name, shape) else { return Ok(Parameter::nothing()) };
        if entry.dtype != dtype {
            let name = self.path(name);
            self.refuse(format!("`{name}` is {:?}, not {dtype:?}", entry.dtype));
            return Ok(Parameter::nothing());
        }
        if !self.is_loading() {
            return Ok(Parameter::nothing());
        }
        let (kind, shape) = seen_as;
        self.placed(entry, entry.range.clone(), shape, kind)
    }

    /// Factors of a packed matrix, in float32. They are counted with the matrix, see [`count_packed`](Self::count_packed).
    pub(crate) fn factors(&self, name: &str, shape: &[i64]) -> Result<Parameter, LoadError> {
        if self.dtype(name) == Some(Dtype::F8_E8M0) {
            let Some(entry) = self.checked(name, shape).filter(|_| self.is_loading()) else {
                return Ok(Parameter::nothing());
            };
            let factors: Vec<f32> =
                entry.file[entry.range.clone()].iter().map(|&code| power_of_two(code)).collect();
            let factors = Tensor::from_slice(&factors).f_reshape(shape)?;
            return Ok(Parameter::owned(factors.f_to_device(self.device)?));
        }
        let stored = self.factors_as_stored(name, shape)?;
        Ok(if stored.defined() { Parameter::owned(stored.f_to_kind(Kind::Float)?) } else { stored })
    }

    /// The same, in the kind they are stored in.
    pub(crate) fn factors_as_stored(&self, name: &str, shape: &[i64]) -> Result<Parameter, LoadError> {
        let Some(entry) = self.checked(name, shape) else { return Ok(Parameter::nothing()) };
        let Some(stored_as) = kind_of(entry.dtype) else {
            let (name, found) = (self.path(name), entry.dtype);
            self.refuse(format!("`{name}` is {found:?}; F32, BF16, F16 and F64 can be read"));
            return Ok(Parameter::nothing());
        };
        match self.is_loading() {
            true => self.placed(entry, entry.range.clone(), shape, stored_as),
            false => Ok(Parameter::nothing()),
        }
    }

    /// One factor, `[]` or `[1]` in the file, as `[]`.
    pub(crate) fn one_factor(&self, name: &str) -> Result<Parameter, LoadError> {
        let shape: &[i64] = match self.entry(name) {
            Some(entry) if entry.shape == [1] => &[1],
            _ => &[],
        };
        let factor = self.factors(name, shape)?;
        Ok(if factor.defined() { Parameter::owned(factor.f_reshape([0i64; 0])?) } else { factor })
    }

    /// The few integers in the tensor `name`, `None` if they are stored as something else.
    pub(crate) fn integers(&self, name: &str) -> Option<Vec<i64>> {
        let entry = self.entry(name)?;
        self.source.asked.borrow_mut().insert(self.path(name));
        let bytes = &entry.file[entry.range.clone()];
        match entry.dtype {
            Dtype::I64 => Some(bytes.as_chunks().0.iter().map(|&b| i64::from_le_bytes(b)).collect()),
            Dtype::I32 => Some(bytes.as_chunks().0.iter().map(|&b| i32::from_le_bytes(b).into()).collect()),
            _ => None,
        }
    }

    /// Adds a packed matrix, with what belongs to it, to the table.
    pub(crate) fn count_packed(&self, stored_as: &str, parameters: i64, names: &[&str], is_mapped: bool) {
        if !self.is_loading() {
            return;
        }
        let stored_bytes =
            names.iter().filter_map(|name| self.entry(name)).map(|entry| entry.range.len()).sum::<usize>();
        let stored_bytes = stored_bytes as u64;
        let mapped_bytes = if is_mapped { stored_bytes } else { 0 };
        let row = LoadRow { tensors: 1, parameters: parameters as u64, stored_bytes, mapped_bytes };
        self.source.table.borrow_mut().add(stored_as, row);
    }

    fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn entry(&self, name: &str) -> Option<&Entry> {
        self.source.checkpoint.tensors.get(&self.path(name))
    }

    /// The entry, unless it is missing or misshapen, which is noted.
    fn checked(&self, name: &str, shape: &[i64]) -> Option<&Entry> {
        let (path, entry) = (self.path(name), self.entry(name));
        let first_time = self.source.asked.borrow_mut().insert(path.clone());
        let problem = match entry {
            Some(entry) if entry.shape == shape => return Some(entry),
            Some(entry) => format!("`{path}` is {:?}, the config asks for {shape:?}", entry.shape),
            None => format!("`{path}` is missing"),
        };
        if first_time {
            self.refuse(problem);
        }
        None
    }

    /// Numbers in `kind`, counted.
    fn load(
        &self,
        entry: &Entry,
        range: std::ops::Range<usize>,
        shape: &[i64],
        stored_as: Kind,
        kind: Kind,
    ) -> Result<Parameter, LoadError> {
        let stored_bytes = range.len() as u64;
        let placed = self.placed(entry, range, shape, stored_as)?;
        let loaded = match stored_as == kind {
            true => placed,
            // Across first, then converted: the narrower of the two usually is the stored one.
            false => Parameter::owned(placed.f_to_kind(kind)?),
        };
        let row = LoadRow {
            tensors: 1,
            parameters: shape.iter().product::<i64>() as u64,
            stored_bytes,
            mapped_bytes: if loaded.is_mapped() { stored_bytes } else { 0 },
        };
        self.source.table.borrow_mut().add(name_of(stored_as), row);
        Ok(loaded)
    }

    /// As stored, on the handle's device.
    fn placed(
        &self,
        entry: &Entry,
        range: std::ops::Range<usize>,
        shape: &[i64],
        kind: Kind,
    ) -> Result<Parameter, LoadError> {
        let stored = match Parameter::over(&entry.file, range.clone(), shape, kind)? {
            Some(mapped) => mapped,
            None => Parameter::owned(Tensor::f_from_data_size(&entry.file[range], shape, kind)?),
        };
        match self.device {
            Device::Cpu => Ok(stored),
            device => Ok(Parameter::owned(stored.f_to_device(device)?)),
        }
    }
}

/// The libtorch kind of a stored dtype that holds plain numbers.
pub(crate) fn kind_of(dtype: Dtype) -> Option<Kind> {
    match dtype {
        Dtype::F32 => Some(Kind::Float),
        Dtype::BF16 => Some(Kind::BFloat16),
        Dtype::F16 => Some(Kind::Half),
        Dtype::F64 => Some(Kind::Double),
        _ => None,
    }
}

/// What a code of e8m0 stands for: only an exponent, biased by 127.
fn power_of_two(code: u8) -> f32 {
    match code {
        // Two below the smallest normal number.
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        code => f32::from_bits(u32::from(code) << 23),
    }
}

fn name_of(kind: Kind) -> &'static str {
    match kind {
        Kind::BFloat16 => "bfloat16",
        Kind::Half => "float16",
        Kind::Double => "float64",
        _ => "float32",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_an_exponent_alone_are_powers_of_two() {
        for (code, exponent) in [(0, -127), (1, -126), (100, -27), (127, 0), (128, 1), (254, 127)] {
            assert_eq!(f64::from(power_of_two(code)), 2f64.powi(exponent), "{code}");
        }
        assert!(power_of_two(255).is_nan());
    }
}
