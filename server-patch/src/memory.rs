//! What the system says of its memory.

/// Bytes of memory that new allocations can have without swapping, if the system says.
pub(crate) fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_system_says_how_much_memory_is_available() {
        let bytes = super::available_memory().expect("Linux has /proc/meminfo");
        assert!(bytes > 1 << 20, "{bytes}");
    }
}
