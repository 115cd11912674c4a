//! The bounds of `docs/contract.md`, applied to every plane and to the logits.

use tch::Tensor;

use super::{Golden, relative_error, worst_element};

/// float32 against a reference: relative error of a plane, and an element's error as a part of its row's largest.
pub(crate) const FLOAT32: (f64, f64) = (1e-4, 1e-3);
/// bfloat16: its error may be so much that of transformers' own bfloat16 run, plus so much.
const BFLOAT16: (f64, f64) = (1.25, 2e-3);
/// Routing choices must be clearer than this, or bfloat16's rounding may flip them.
pub(crate) const MARGIN: f64 = 5e-3;

fn planes(of: &Tensor) -> impl Iterator<Item = Tensor> + '_ {
    (0..of.size()[1]).map(|plane| of.select(1, plane))
}

#[track_caller]
pub(crate) fn within_float32(
    what: &str,
    (found_planes, found_logits): &(Tensor, Tensor),
    golden: &Golden,
    reference: &str,
) {
    let expected = golden.get(&format!("planes_{reference}"));
    assert_eq!(found_planes.size(), expected.size(), "{what}: shape of the planes");
    let mut worst = (0f64, 0f64);
    let mut check = |part: String, found: &Tensor, expected: &Tensor| {
        let errors = (relative_error(found, expected), worst_element(found, expected));
        assert!(
            errors.0 <= FLOAT32.0 && errors.1 <= FLOAT32.1,
            "{what}, {part} against {reference}: {errors:?}"
        );
        worst = (worst.0.max(errors.0), worst.1.max(errors.1));
    };
    for (plane, (found, expected)) in planes(found_planes).zip(planes(&expected)).enumerate() {
        check(format!("plane {plane}"), &found, &expected);
    }
    check("logits".to_owned(), found_logits, &golden.get(&format!("logits_{reference}")));
    println!("{what} against {reference}: relative {:.1e}, element {:.1e}", worst.0, worst.1);
}

#[track_caller]
pub(crate) fn within_bfloat16(what: &str, (found_planes, found_logits): &(Tensor, Tensor), golden: &Golden) {
    let mut largest = 0f64;
    let mut check = |part: String, found: &Tensor, theirs: &Tensor, exact: &Tensor| {
        let (ours, theirs) = (relative_error(found, exact), relative_error(theirs, exact));
        assert!(
            ours <= BFLOAT16.0 * theirs + BFLOAT16.1,
            "{what}, {part}: {ours:.2e}, transformers {theirs:.2e}"
        );
        largest = largest.max(ours / theirs.max(1e-9));
    };
    let (theirs, exact) = (golden.get("planes_bf16"), golden.get("planes_f32"));
    // Plane 0 is the embedding, which both have exactly.
    let three = planes(found_planes).zip(planes(&theirs)).zip(planes(&exact)).enumerate().skip(1);
    for (plane, ((found, theirs), exact)) in three {
        check(format!("plane {plane}"), &found, &theirs, &exact);
    }
    check("logits".to_owned(), found_logits, &golden.get("logits_bf16"), &golden.get("logits_f32"));
    println!("{what}: at most {largest:.2} times the error of transformers' own bfloat16 run");
}
