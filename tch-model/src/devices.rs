//! Layers over devices.

use std::ops::Range;

use tch::Device;

/// A run of layers on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stage {
    pub(crate) device: Device,
    pub(crate) layers: Range<usize>,
}

/// Layers in order over devices in order, as evenly as can be: the first ones get one more. No device is left without.
pub(crate) fn spread(layers: usize, devices: &[Device]) -> Vec<Stage> {
    let (each, more) = (layers / devices.len().max(1), layers % devices.len().max(1));
    let first = |stage: usize| stage * each + stage.min(more);
    let stage = |(index, &device): (usize, &Device)| Stage { device, layers: first(index)..first(index + 1) };
    devices.iter().enumerate().map(stage).collect()
}

/// As options spell it.
pub(crate) fn name(device: Device) -> String {
    match device {
        Device::Cpu => "cpu".to_owned(),
        Device::Cuda(index) => format!("cuda:{index}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_spread_in_order_and_evenly() {
        let runs = |layers, devices| -> Vec<Range<usize>> {
            let devices: Vec<Device> = (0..devices).map(Device::Cuda).collect();
            let stages = spread(layers, &devices);
            assert_eq!(stages.iter().map(|stage| stage.device).collect::<Vec<_>>(), devices);
            stages.into_iter().map(|stage| stage.layers).collect()
        };
        assert_eq!(runs(27, 1), vec![Range { start: 0, end: 27 }]);
        assert_eq!(runs(8, 2), [0..4, 4..8]);
        assert_eq!(runs(61, 4), [0..16, 16..31, 31..46, 46..61]);
        assert_eq!(runs(2, 2), [0..1, 1..2]);
    }
}
