//! The part of the pickle protocol that a dict of tensors and texts needs. Nothing is ever called.

use std::{collections::HashMap, rc::Rc};

/// Steps after which a pickle is taken for none of ours: a tensor needs about forty. It also bounds how deep values nest,
/// which are dropped by recursion.
const MAX_STEPS: usize = 4000;

/// What a pickle can hold here.
#[derive(Clone, Debug)]
pub(super) enum Value {
    None,
    Bool,
    Int(i64),
    Text(String),
    Global(String),
    Tuple(Rc<Vec<Value>>),
    Dict(Rc<Vec<(Value, Value)>>),
    /// A persistent ID: a storage.
    Persistent(Rc<Value>),
    /// A call: what, and with which arguments.
    Call(Rc<(Value, Value)>),
    Mark,
}

/// The arguments of `torch._utils._rebuild_tensor_v2`.
#[derive(Debug)]
pub(super) struct TensorRef<'a> {
    pub(super) class: &'a str,
    pub(super) storage: &'a str,
    pub(super) offset: i64,
    pub(super) shape: Vec<usize>,
    pub(super) stride: Vec<usize>,
}

/// Why bytes are not such a pickle.
#[derive(Debug, thiserror::Error)]
pub(super) enum PickleError {
    #[error("its pickle is cut short")]
    CutShort,
    #[error("its pickle has opcode {0:#04x}, which a dict of tensors does not need")]
    Opcode(u8),
    #[error("its pickle takes more than {MAX_STEPS} steps")]
    TooLong,
    #[error("its pickle is malformed")]
    Malformed,
    #[error("its pickle is not a dict")]
    NotADict,
}

impl Value {
    /// What it is, for an error message.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Bool => "a boolean",
            Self::Int(_) => "a number",
            Self::Text(_) => "a text",
            Self::Global(_) => "a class",
            Self::Tuple(_) => "a tuple",
            Self::Dict(_) => "a dict",
            Self::Persistent(_) => "a storage",
            Self::Call(_) => "an object",
            Self::Mark => "a mark",
        }
    }

    /// The tensor that this value rebuilds, if it is one.
    pub(super) fn as_tensor(&self) -> Option<TensorRef<'_>> {
        let Self::Call(call) = self else { return None };
        let (Self::Global(function), Self::Tuple(arguments)) = (&call.0, &call.1) else { return None };
        if function != "torch._utils._rebuild_tensor_v2" {
            return None;
        }
        let [Self::Persistent(storage), Self::Int(offset), Self::Tuple(shape), Self::Tuple(stride), ..] =
            &arguments[..]
        else {
            return None;
        };
        let Self::Tuple(storage) = &**storage else { return None };
        let [_, Self::Global(class), Self::Text(storage), ..] = &storage[..] else { return None };
        let sizes = |values: &[Self]| -> Option<Vec<usize>> {
            values
                .iter()
                .map(|value| if let Self::Int(int) = value { usize::try_from(*int).ok() } else { None })
                .collect()
        };
        let (shape, stride) = (sizes(shape)?, sizes(stride)?);
        Some(TensorRef { class: class.strip_prefix("torch.")?, storage, offset: *offset, shape, stride })
    }
}

/// The dict that `pickle` holds, its keys texts.
pub(super) fn dict(pickle: &[u8]) -> Result<HashMap<String, Value>, PickleError> {
    let Value::Dict(items) = (Machine { rest: pickle, stack: Vec::new(), memo: HashMap::new() }).run()?
    else {
        return Err(PickleError::NotADict);
    };
    items
        .iter()
        .map(|(key, value)| match key {
            Value::Text(key) => Ok((key.clone(), value.clone())),
            _ => Err(PickleError::NotADict),
        })
        .collect()
}

struct Machine<'a> {
    rest: &'a [u8],
    stack: Vec<Value>,
    memo: HashMap<u32, Value>,
}

impl<'a> Machine<'a> {
    fn run(mut self) -> Result<Value, PickleError> {
        for _ in 0..MAX_STEPS {
            let [opcode] = self.take()?;
            match opcode {
                0x80 => drop(self.take::<1>()?), // PROTO
                b'}' => self.stack.push(Value::Dict(Rc::default())),
                b')' => self.stack.push(Value::Tuple(Rc::default())),
                b'(' => self.stack.push(Value::Mark),
                b'N' => self.stack.push(Value::None),
                0x88 | 0x89 => self.stack.push(Value::Bool),
                b'K' => {
                    let [value] = self.take()?;
                    self.stack.push(Value::Int(value.into()));
                }
                b'M' => {
                    let value = u16::from_le_bytes(self.take()?);
                    self.stack.push(Value::Int(value.into()));
                }
                b'J' => {
                    let value = i32::from_le_bytes(self.take()?);
                    self.stack.push(Value::Int(value.into()));
                }
                0x8a => self.long()?,
                b'X' => {
                    let length = u32::from_le_bytes(self.take()?) as usize;
                    let text =
                        std::str::from_utf8(self.bytes(length)?).map_err(|_| PickleError::Malformed)?;
                    self.stack.push(Value::Text(text.to_owned()));
                }
                b'c' => {
                    let name = format!("{}.{}", self.line()?, self.line()?);
                    self.stack.push(Value::Global(name));
                }
                b'q' => {
                    let [slot] = self.take()?;
                    self.remember(slot.into())?;
                }
                b'r' => {
                    let slot = u32::from_le_bytes(self.take()?);
                    self.remember(slot)?;
                }
                b'h' => {
                    let [slot] = self.take()?;
                    self.recall(slot.into())?;
                }
                b'j' => {
                    let slot = u32::from_le_bytes(self.take()?);
                    self.recall(slot)?;
                }
                b't' => {
                    let values = self.since_mark()?;
                    self.stack.push(Value::Tuple(values.into()));
                }
                0x85..=0x87 => {
                    let at = self
                        .stack
                        .len()
                        .checked_sub(usize::from(opcode - 0x84))
                        .ok_or(PickleError::Malformed)?;
                    let values = self.stack.split_off(at);
                    self.stack.push(Value::Tuple(values.into()));
                }
                b's' => {
                    let (value, key) = (self.pop()?, self.pop()?);
                    self.set(vec![key, value])?;
                }
                b'u' => {
                    let values = self.since_mark()?;
                    self.set(values)?;
                }
                b'Q' => {
                    let id = self.pop()?;
                    self.stack.push(Value::Persistent(id.into()));
                }
                b'R' => {
                    let (arguments, function) = (self.pop()?, self.pop()?);
                    self.stack.push(Value::Call((function, arguments).into()));
                }
                b'.' => return self.pop(),
                other => return Err(PickleError::Opcode(other)),
            }
        }
        Err(PickleError::TooLong)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], PickleError> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(PickleError::CutShort)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn bytes(&mut self, length: usize) -> Result<&'a [u8], PickleError> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(PickleError::CutShort)?;
        self.rest = rest;
        Ok(taken)
    }

    fn line(&mut self) -> Result<&'a str, PickleError> {
        let end = self.rest.iter().position(|byte| *byte == b'\n').ok_or(PickleError::CutShort)?;
        let line = std::str::from_utf8(self.bytes(end)?).map_err(|_| PickleError::Malformed)?;
        self.take::<1>()?;
        Ok(line)
    }

    /// LONG1: little-endian two's complement of a stated length.
    fn long(&mut self) -> Result<(), PickleError> {
        let [length] = self.take()?;
        let bytes = self.bytes(length.into())?;
        let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
        let mut wide = [if negative { 0xff } else { 0 }; 16];
        wide.get_mut(..bytes.len()).ok_or(PickleError::Malformed)?.copy_from_slice(bytes);
        let value = i64::try_from(i128::from_le_bytes(wide)).map_err(|_| PickleError::Malformed)?;
        self.stack.push(Value::Int(value));
        Ok(())
    }

    fn pop(&mut self) -> Result<Value, PickleError> {
        match self.stack.pop() {
            Some(Value::Mark) | None => Err(PickleError::Malformed),
            Some(value) => Ok(value),
        }
    }

    fn since_mark(&mut self) -> Result<Vec<Value>, PickleError> {
        let mark = self
            .stack
            .iter()
            .rposition(|value| matches!(value, Value::Mark))
            .ok_or(PickleError::Malformed)?;
        let values = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(values)
    }

    fn set(&mut self, values: Vec<Value>) -> Result<(), PickleError> {
        let Some(Value::Dict(items)) = self.stack.last_mut() else { return Err(PickleError::Malformed) };
        if !values.len().is_multiple_of(2) {
            return Err(PickleError::Malformed);
        }
        let items = Rc::make_mut(items);
        let mut values = values.into_iter();
        while let (Some(key), Some(value)) = (values.next(), values.next()) {
            items.push((key, value));
        }
        Ok(())
    }

    fn remember(&mut self, slot: u32) -> Result<(), PickleError> {
        let value = self.stack.last().ok_or(PickleError::Malformed)?.clone();
        self.memo.insert(slot, value);
        Ok(())
    }

    fn recall(&mut self, slot: u32) -> Result<(), PickleError> {
        let value = self.memo.get(&slot).ok_or(PickleError::Malformed)?.clone();
        self.stack.push(value);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `pickle.dumps({'a': 'b', 'n': (1, 300, -70000, 2**40), 'again': 'b'}, protocol=2)` of CPython 3.11.
    const WRITTEN_BY_PYTHON: &[u8] = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01X\x01\x00\x00\x00bq\x02X\x01\x00\x00\x00nq\x03(K\x01M,\x01J\x90\xee\xfe\xff\x8a\x06\x00\x00\x00\x00\x00\x01tq\x04X\x05\x00\x00\x00againq\x05h\x02u.";

    #[test]
    fn what_python_writes_is_read() {
        let dict = dict(WRITTEN_BY_PYTHON).unwrap();
        assert!(matches!(&dict["a"], Value::Text(text) if text == "b"));
        assert!(matches!(&dict["again"], Value::Text(text) if text == "b"));
        let Value::Tuple(numbers) = &dict["n"] else { panic!("{dict:?}") };
        let numbers: Vec<_> =
            numbers.iter().map(|n| if let Value::Int(n) = n { *n } else { panic!("{n:?}") }).collect();
        assert_eq!(numbers, [1, 300, -70000, 1 << 40]);
    }

    #[test]
    fn an_opcode_that_could_run_something_is_refused() {
        let error = dict(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x93.").unwrap_err();
        assert!(matches!(error, PickleError::Opcode(0x93)));
        assert!(matches!(dict(b"\x80\x02K\x01."), Err(PickleError::NotADict)));
    }

    #[test]
    fn nesting_is_bounded() {
        let mut deep = b"\x80\x02)".to_vec();
        deep.resize(1 << 20, 0x85);
        assert!(matches!(dict(&deep), Err(PickleError::TooLong)));
    }

    proptest! {
        #[test]
        fn a_pickle_cut_short_is_refused(cut in 0..WRITTEN_BY_PYTHON.len()) {
            prop_assert!(dict(&WRITTEN_BY_PYTHON[..cut]).is_err());
        }

        #[test]
        fn no_input_makes_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = dict(&bytes);
        }
    }
}
