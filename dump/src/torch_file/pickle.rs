//! The few opcodes of pickle protocol 2 that a dict of tensors needs.

/// A pickle under construction.
pub(super) struct Pickle(Vec<u8>);

const PROTO_2: &[u8] = b"\x80\x02";
const EMPTY_DICT: u8 = b'}';
const MARK: u8 = b'(';
const SETITEMS: u8 = b'u';
const STOP: u8 = b'.';
const GLOBAL: u8 = b'c';
const BINUNICODE: u8 = b'X';
const BININT: u8 = b'J';
const LONG1: u8 = 0x8a;
const NEWFALSE: u8 = 0x89;
const TUPLE: u8 = b't';
const EMPTY_TUPLE: u8 = b')';
const BINPERSID: u8 = b'Q';
const REDUCE: u8 = b'R';

impl Pickle {
    /// A dict without entries yet; [`finish_dict`](Self::finish_dict) ends it.
    pub(super) fn dict() -> Self {
        let mut bytes = PROTO_2.to_vec();
        bytes.extend([EMPTY_DICT, MARK]);
        Self(bytes)
    }

    /// A whole pickle of one tensor.
    pub(super) fn tensor_alone(class: &str, name: &str, shape: &[usize]) -> Vec<u8> {
        let mut pickle = Self(PROTO_2.to_vec());
        pickle.rebuilt(class, name, shape);
        pickle.0.push(STOP);
        pickle.0
    }

    /// `key: value`, both text.
    pub(super) fn string(&mut self, key: &str, value: &str) {
        self.text(key);
        self.text(value);
    }

    /// `key: torch._utils._rebuild_tensor_v2(storage, 0, shape, stride, False, OrderedDict())`, contiguous.
    pub(super) fn tensor(&mut self, key: &str, class: &str, name: &str, shape: &[usize]) {
        self.text(key);
        self.rebuilt(class, name, shape);
    }

    fn rebuilt(&mut self, class: &str, name: &str, shape: &[usize]) {
        self.global("torch._utils", "_rebuild_tensor_v2");
        self.0.push(MARK);
        // The storage, by persistent ID: ("storage", class, name, device, elements).
        self.0.push(MARK);
        self.text("storage");
        self.global("torch", class);
        self.text(name);
        self.text("cpu");
        self.int(shape.iter().product());
        self.0.extend([TUPLE, BINPERSID]);
        self.int(0);
        self.tuple(shape);
        self.tuple(&strides(shape));
        self.0.push(NEWFALSE);
        self.global("collections", "OrderedDict");
        self.0.extend([EMPTY_TUPLE, REDUCE]);
        self.0.extend([TUPLE, REDUCE]);
    }

    pub(super) fn finish_dict(mut self) -> Vec<u8> {
        self.0.extend([SETITEMS, STOP]);
        self.0
    }

    fn text(&mut self, text: &str) {
        self.0.push(BINUNICODE);
        let len = u32::try_from(text.len()).expect("keys and IDs are shorter than 4 GiB");
        self.0.extend(len.to_le_bytes());
        self.0.extend(text.as_bytes());
    }

    fn global(&mut self, module: &str, name: &str) {
        self.0.push(GLOBAL);
        self.0.extend(format!("{module}\n{name}\n").as_bytes());
    }

    fn int(&mut self, value: usize) {
        match i32::try_from(value) {
            Ok(small) => {
                self.0.push(BININT);
                self.0.extend(small.to_le_bytes());
            }
            Err(_) => {
                // LONG1 is signed: a ninth byte keeps a set top bit from reading as a sign.
                self.0.extend([LONG1, 9]);
                self.0.extend((value as u64).to_le_bytes());
                self.0.push(0);
            }
        }
    }

    fn tuple(&mut self, values: &[usize]) {
        self.0.push(MARK);
        values.iter().for_each(|&value| self.int(value));
        self.0.push(TUPLE);
    }
}

/// Elements between neighbours along each dimension of a contiguous tensor.
fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides: Vec<usize> = shape
        .iter()
        .rev()
        .scan(1, |stride, &len| Some(std::mem::replace(stride, *stride * len.max(1))))
        .collect();
    strides.reverse();
    strides
}

#[cfg(test)]
mod tests {
    use super::strides;

    #[test]
    fn strides_are_those_of_a_contiguous_tensor() {
        assert_eq!(strides(&[2, 3, 4]), [12, 4, 1]);
        assert_eq!(strides(&[7]), [1]);
        assert_eq!(strides(&[1, 0, 5]), [5, 5, 1]);
        assert!(strides(&[]).is_empty());
    }
}
