//! Series of one name whose labels are closed enums: all made at once, found by index.

use std::marker::PhantomData;

use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};

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
#[derive(Clone, Debug)]
pub struct Family<L, M> {
    series: Vec<M>,
    label: PhantomData<fn(L)>,
}

impl<L: Label, M> Family<L, M> {
    /// The series of one value.
    pub fn at(&self, label: L) -> &M {
        &self.series[label.index()]
    }
}

impl<L: Label> Family<L, IntCounter> {
    pub(super) fn counters(registry: &Registry, name: &str, help: &str) -> Result<Self, prometheus::Error> {
        let vec = IntCounterVec::new(Opts::new(name, help), &[L::NAME])?;
        let series = L::ALL.iter().map(|label| vec.with_label_values(&[label.text()])).collect();
        registry.register(Box::new(vec))?;
        Ok(Self { series, label: PhantomData })
    }
}

impl<L: Label> Family<L, IntGauge> {
    pub(super) fn gauges(registry: &Registry, name: &str, help: &str) -> Result<Self, prometheus::Error> {
        let vec = IntGaugeVec::new(Opts::new(name, help), &[L::NAME])?;
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
