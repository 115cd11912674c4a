//! `quantization_config`: which modules are stored in fewer bits, and how.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::iter;
use std::path::Path;

use regex::{Regex, RegexSet};
use serde_json::{Map, Value};

use super::keys::Keys;
use super::raw::shortened;
use crate::LoadError;

/// What a config says of the stored weights. Activations are never quantised here, whatever it says of them: that is a
/// matter of a server's speed, not of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantisation {
    /// How the modules it is about are stored.
    pub scheme: Scheme,
    /// Names or patterns of those modules; `Linear` for every one that is a matrix product.
    targets: Vec<String>,
    /// Names or patterns of modules that are stored plain all the same.
    ignore: Vec<String>,
}

/// A way of storing a matrix in fewer bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// fp8 (e4m3), one factor for each block of so many outputs and inputs: DeepSeek-V3, R1, Kimi-K2.
    BlockFp8 {
        /// Outputs of a block.
        rows: i64,
        /// Inputs of a block.
        columns: i64,
    },
    /// Four-bit integers around zero, one factor for so many inputs of an output, by compressed-tensors: Kimi-K2-Thinking,
    /// Kimi-K2.5.
    Int4 {
        /// Inputs that share a factor.
        group: i64,
    },
    /// NVFP4 as ModelOpt writes it: four-bit floats, an fp8 factor for 16 inputs of an output, and one for the matrix.
    Nvfp4ModelOpt,
    /// NVFP4 as compressed-tensors writes it: the matrix's number is divided by.
    Nvfp4CompressedTensors,
}

/// Inputs that share a factor in NVFP4.
pub(crate) const NVFP4_GROUP: i64 = 16;

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BlockFp8 { rows, columns } => write!(f, "fp8 in blocks of {rows}x{columns}"),
            Self::Int4 { group } => write!(f, "int4 in groups of {group}"),
            Self::Nvfp4ModelOpt => f.write_str("nvfp4 (ModelOpt)"),
            Self::Nvfp4CompressedTensors => f.write_str("nvfp4 (compressed-tensors)"),
        }
    }
}

/// The key in `config.json`.
const KEY: &str = "quantization_config";
/// ModelOpt's own file, the only place for it in its first checkpoints.
const MODELOPT_FILE: &str = "hf_quant_config.json";

impl Quantisation {
    /// ModelOpt's `hf_quant_config.json` as a `quantization_config`, where there is such a file.
    pub(super) fn modelopt_file(dir: &Path) -> Result<Option<Map<String, Value>>, LoadError> {
        let path = dir.join(MODELOPT_FILE);
        if !path.is_file() {
            return Ok(None);
        }
        let bytes = fs::read(&path).map_err(|source| LoadError::Read { path: path.clone(), source })?;
        let file: Map<String, Value> =
            serde_json::from_slice(&bytes).map_err(|source| LoadError::Json { path, source })?;
        let mut config = match file.get("quantization") {
            Some(Value::Object(config)) => config.clone(),
            _ => Map::new(),
        };
        config.insert("quant_method".to_owned(), "modelopt".into());
        Ok(Some(config))
    }

    pub(super) fn read(object: &Map<String, Value>) -> Result<Self, LoadError> {
        let mut keys = Keys::new(KEY, object);
        let method = keys.text("quant_method")?.ok_or_else(|| keys.missing("quant_method", METHODS))?;
        let read = match method {
            "fp8" => block_fp8(&mut keys)?,
            "compressed-tensors" => compressed_tensors(&mut keys)?,
            "modelopt" | "modelopt_fp4" => modelopt(&mut keys)?,
            other => return Err(keys.refuse("quant_method", other, METHODS)),
        };
        keys.refuse_the_rest("no such key; if it does not change the weights, remove it")?;
        for (key, patterns) in [("targets", &read.targets), ("ignore", &read.ignore)] {
            if let Some(bad) = patterns.iter().find(|pattern| Regex::new(&expression(pattern)).is_err()) {
                let supported = "names, wildcards, and regular expressions after `re:`";
                return Err(keys.refuse(key, shortened(&bad.as_str().into()), supported));
            }
        }
        // Each of them was compiled just now; only all together can be too much.
        if Patterns::new(&read.targets).and(Patterns::new(&read.ignore)).is_err() {
            let count = read.targets.len() + read.ignore.len();
            return Err(keys.refuse(
                "ignore",
                format!("{count} patterns"),
                "fewer expressions and wildcards",
            ));
        }
        Ok(read)
    }

    /// The modules it is about, ready to be looked up.
    pub(crate) fn modules(&self) -> Modules {
        let ready = |patterns: &[String]| Patterns::new(patterns).expect("they were compiled in `read`");
        Modules {
            every_linear: self.targets.iter().any(|target| target == "Linear"),
            targets: ready(&self.targets),
            ignore: ready(&self.ignore),
        }
    }
}

/// Which modules a [`Quantisation`] is about.
#[derive(Debug)]
pub(crate) struct Modules {
    every_linear: bool,
    targets: Patterns,
    ignore: Patterns,
}

impl Modules {
    /// Whether it names the module, which may be known under several names, as one that stays plain.
    pub(crate) fn ignores(&self, names: &[impl AsRef<str>]) -> bool {
        names.iter().any(|name| self.ignore.fit(name.as_ref()))
    }

    /// Whether it says that the module is quantised.
    pub(crate) fn includes(&self, names: &[impl AsRef<str>]) -> bool {
        let targeted = self.every_linear || names.iter().any(|name| self.targets.fit(name.as_ref()));
        targeted && !self.ignores(names)
    }
}

/// Patterns of all three tools: `re:` and a regular expression that fits from the start (compressed-tensors), wildcards
/// (ModelOpt), and plain names, of which a config may list hundreds.
#[derive(Debug)]
struct Patterns {
    names: HashSet<String>,
    expressions: RegexSet,
}

impl Patterns {
    fn new(patterns: &[String]) -> Result<Self, regex::Error> {
        let is_name = |pattern: &&String| !pattern.starts_with("re:") && !pattern.contains(['*', '?']);
        let (names, others): (Vec<_>, Vec<_>) = patterns.iter().partition(is_name);
        let expressions = RegexSet::new(others.into_iter().map(|pattern| expression(pattern)))?;
        Ok(Self { names: names.into_iter().cloned().collect(), expressions })
    }

    /// A plain name also stands for what is inside of it, and for the last parts of longer ones.
    fn fit(&self, module: &str) -> bool {
        let dots = || module.match_indices('.').map(|(at, _)| at);
        let (starts, ends) = (iter::once(0).chain(dots().map(|at| at + 1)), dots().chain([module.len()]));
        let ends: Vec<usize> = ends.collect();
        let named = |start: usize| {
            ends.iter().filter(|&&end| end > start).any(|&end| self.names.contains(&module[start..end]))
        };
        starts.into_iter().any(named) || self.expressions.is_match(module)
    }
}

const METHODS: &str = "fp8, compressed-tensors and modelopt";

/// A pattern as a regular expression.
fn expression(pattern: &str) -> String {
    match pattern.strip_prefix("re:") {
        Some(expression) => format!("^(?:{expression})"),
        None => {
            let wild = regex::escape(pattern).replace(r"\*", ".*").replace(r"\?", ".");
            format!(r"(?:^|\.){wild}(?:$|\.)")
        }
    }
}

/// DeepSeek's own.
fn block_fp8(keys: &mut Keys<'_>) -> Result<Quantisation, LoadError> {
    expect(keys, "fmt", "e4m3")?;
    expect(keys, "activation_scheme", "dynamic")?;
    keys.pass_over(&["scale_fmt"]);
    let block = keys.get("weight_block_size").cloned();
    let block = block
        .ok_or_else(|| keys.missing("weight_block_size", "one factor for a whole matrix is not read"))?;
    let size = |index| block.get(index).and_then(Value::as_i64).filter(|&size| (1..=1 << 20).contains(&size));
    let (Some(rows), Some(columns), None) = (size(0), size(1), block.get(2)) else {
        return Err(keys.refuse(
            "weight_block_size",
            shortened(&block),
            "two positive numbers such as [128,128]",
        ));
    };
    let mut ignore = keys.texts("modules_to_not_convert")?.unwrap_or_default();
    ignore.extend(keys.texts("ignored_layers")?.unwrap_or_default());
    Ok(Quantisation {
        scheme: Scheme::BlockFp8 { rows, columns },
        targets: vec!["Linear".to_owned()],
        ignore,
    })
}

fn compressed_tensors(keys: &mut Keys<'_>) -> Result<Quantisation, LoadError> {
    expect(keys, "quantization_status", "compressed")?;
    keys.pass_over(&["global_compression_ratio", "kv_cache_scheme", "version"]);
    let ignore = keys.texts("ignore")?.unwrap_or_default();
    let format = keys.text("format")?;
    let groups = keys.object("config_groups")?.filter(|groups| !groups.is_empty());
    let groups = groups.ok_or_else(|| keys.missing("config_groups", "it says how weights are stored"))?;
    let (mut schemes, mut targets) = (Vec::new(), Vec::new());
    for (name, group) in groups {
        let path = keys.path(&format!("config_groups.{name}"));
        let empty = Map::new();
        let mut group = Keys::new(path, group.as_object().unwrap_or(&empty));
        group.pass_over(&["input_activations", "output_activations"]);
        let format = group.text("format")?.or(format);
        targets.extend(group.texts("targets")?.ok_or_else(|| group.missing("targets", "names of modules"))?);
        let weights = group.object("weights")?;
        let weights = weights.ok_or_else(|| group.missing("weights", "it says how weights are stored"))?;
        group.refuse_the_rest("no such key")?;
        schemes.push(scheme(&mut Keys::new(group.path("weights"), weights), format)?);
    }
    schemes.dedup();
    match schemes[..] {
        [scheme] => Ok(Quantisation { scheme, targets, ignore }),
        _ => {
            let found = schemes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
            Err(keys.refuse("config_groups", found, "groups that are all stored alike"))
        }
    }
}

/// How the weights of one group are stored.
fn scheme(keys: &mut Keys<'_>, format: Option<&str>) -> Result<Scheme, LoadError> {
    const FORMATS: &str = "pack-quantized with int4 and nvfp4-pack-quantized";
    let (kind, scheme) = match format {
        Some("pack-quantized") => ("int", None),
        Some("nvfp4-pack-quantized") => ("float", Some(Scheme::Nvfp4CompressedTensors)),
        other => {
            return Err(LoadError::unsupported(&format!("{KEY}.format"), other.unwrap_or("null"), FORMATS));
        }
    };
    keys.pass_over(&["block_structure", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"]);
    expect(keys, "type", kind)?;
    expect(keys, "strategy", if scheme.is_none() { "group" } else { "tensor_group" })?;
    if let Some(bits) = keys.number("num_bits")?.filter(|&bits| bits != 4.0) {
        return Err(keys.refuse("num_bits", bits, "4"));
    }
    if keys.flag("symmetric")? == Some(false) {
        return Err(keys.refuse("symmetric", false, "true: a factor and no zero point"));
    }
    let group = match keys.number("group_size")? {
        None if scheme.is_some() => NVFP4_GROUP,
        // An odd group would end inside a byte.
        Some(size) if (2.0..=4096.0).contains(&size) && size % 2.0 == 0.0 => size as i64,
        Some(size) => return Err(keys.refuse("group_size", size, "an even number from 2 to 4096")),
        None => return Err(keys.missing("group_size", "groups have a size")),
    };
    keys.refuse_the_rest("no such key, or nothing in it")?;
    match scheme {
        None => Ok(Scheme::Int4 { group }),
        Some(scheme) if group == NVFP4_GROUP => Ok(scheme),
        Some(_) => Err(keys.refuse("group_size", group, NVFP4_GROUP)),
    }
}

fn modelopt(keys: &mut Keys<'_>) -> Result<Quantisation, LoadError> {
    let algorithm =
        keys.text("quant_algo")?.ok_or_else(|| keys.missing("quant_algo", "NVFP4 can be read"))?;
    if algorithm != "NVFP4" {
        return Err(keys.refuse("quant_algo", algorithm, "NVFP4"));
    }
    if let Some(size) = keys.number("group_size")?.filter(|&size| size != NVFP4_GROUP as f64) {
        return Err(keys.refuse("group_size", size, NVFP4_GROUP));
    }
    // The groups repeat what the algorithm's name says.
    keys.pass_over(&["config_groups", "kv_cache_quant_algo", "kv_cache_scheme", "producer"]);
    let mut ignore = keys.texts("ignore")?.unwrap_or_default();
    ignore.extend(keys.texts("exclude_modules")?.unwrap_or_default());
    Ok(Quantisation { scheme: Scheme::Nvfp4ModelOpt, targets: vec!["Linear".to_owned()], ignore })
}

/// A key that is absent, null, or just this.
fn expect(keys: &mut Keys<'_>, key: &'static str, wanted: &str) -> Result<(), LoadError> {
    match keys.text(key)?.filter(|&found| found != wanted) {
        Some(found) => Err(keys.refuse(key, found, wanted)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
