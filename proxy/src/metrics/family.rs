//! Series of one name whose labels are closed enums: all made at once, found by index.

use std::marker::PhantomData;

use prometheus::{Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts, Registry};

/// A label with a closed set of values.
pub trait Label: Copy + 'static {
    /// The label's name.
    const NAME: &'static str;
    /// Every value, in the order of their indices.
    const ALL: &'static [Self];
    /// The value as exported.
    fn text(self) -> &'static str;
    /// Its place in `ALL`.
    fn index(self) -> usize;
}

/// Makes an enum whose values are those of a label.
macro_rules! labels {
    ($(#[$doc:meta])* pub enum $name:ident: $label:literal { $($value:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $(#[doc = concat!("`", $text, "`")] $value,)+
        }

        impl Label for $name {
            const NAME: &'static str = $label;
            const ALL: &'static [Self] = &[$(Self::$value,)+];
            fn text(self) -> &'static str {
                match self { $(Self::$value => $text,)+ }
            }
            fn index(self) -> usize {
                self as usize
            }
        }
    };
}
pub(super) use labels;

/// One series for each value of a label.
#[derive(Debug)]
pub struct Family<L, M> {
    series: Vec<M>,
    label: PhantomData<fn(L)>,
}

/// One series for each pair of values of two labels.
#[derive(Debug)]
pub struct Family2<A, B, M> {
    series: Vec<M>,
    labels: PhantomData<fn(A, B)>,
}

impl<L: Label, M> Family<L, M> {
    /// The series of one value.
    pub fn at(&self, label: L) -> &M {
        &self.series[label.index()]
    }
}

impl<L: Label> Family<L, IntCounter> {
    pub(super) fn counters(registry: &Registry, name: &str, help: &str) -> Result<Self, prometheus::Error> {
        Self::counters_with(registry, Opts::new(name, help))
    }

    pub(super) fn counters_with(registry: &Registry, opts: Opts) -> Result<Self, prometheus::Error> {
        let vec = IntCounterVec::new(opts, &[L::NAME])?;
        let series = L::ALL.iter().map(|label| vec.with_label_values(&[label.text()])).collect();
        registry.register(Box::new(vec))?;
        Ok(Self { series, label: PhantomData })
    }
}

impl<L: Label> Family<L, Histogram> {
    pub(super) fn histograms(
        registry: &Registry,
        name: &str,
        help: &str,
        buckets: &[f64],
    ) -> Result<Self, prometheus::Error> {
        let vec = HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), &[L::NAME])?;
        let series = L::ALL.iter().map(|label| vec.with_label_values(&[label.text()])).collect();
        registry.register(Box::new(vec))?;
        Ok(Self { series, label: PhantomData })
    }
}

impl<A: Label, B: Label, M> Family2<A, B, M> {
    /// The series of one pair.
    pub fn at(&self, a: A, b: B) -> &M {
        &self.series[a.index() * B::ALL.len() + b.index()]
    }
}

impl<A: Label, B: Label> Family2<A, B, IntCounter> {
    pub(super) fn counters(registry: &Registry, name: &str, help: &str) -> Result<Self, prometheus::Error> {
        let vec = IntCounterVec::new(Opts::new(name, help), &[A::NAME, B::NAME])?;
        let pairs = A::ALL.iter().flat_map(|a| B::ALL.iter().map(move |b| (a, b)));
        let series = pairs.map(|(a, b)| vec.with_label_values(&[a.text(), b.text()])).collect();
        registry.register(Box::new(vec))?;
        Ok(Self { series, labels: PhantomData })
    }
}
