//! How long to wait before the next poll.

use std::time::Duration;

/// The first wait after a failure: an apiserver that restarts is away for 2 to 4 seconds.
const FIRST: Duration = Duration::from_millis(500);

/// The longest that a server's `Retry-After` is obeyed. A broken or hostile value must not make us blind for long.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(30);

/// The next wait after `failures` failures in a row (none: the last poll was good), with the server's `Retry-After`.
///
/// Failures are retried sooner than the interval at first, twice as late each time, and never later than the interval:
/// an apiserver that comes back is noticed within one. `random` is any number; it moves the wait by up to 5 % either way,
/// so that a fleet of Envoys does not poll in step.
pub fn wait(interval: Duration, failures: u32, retry_after: Option<Duration>, random: u32) -> Duration {
    let doubled =
        failures.checked_sub(1).map(|times| FIRST.saturating_mul(1_u32.checked_shl(times).unwrap_or(u32::MAX)));
    let wait = doubled.map_or(interval, |backoff| backoff.min(interval));
    let asked_for = retry_after.unwrap_or_default().min(MAX_RETRY_AFTER);
    // 950 to 1050 thousandths.
    let thousandths = 950_u32.saturating_add(random.checked_rem(101).unwrap_or_default());
    let jittered = wait.saturating_mul(thousandths).checked_div(1000).unwrap_or(wait);
    jittered.max(asked_for)
}

/// The seconds of a `Retry-After` header. Dates, which apiservers do not send, count as absent.
pub fn retry_after(header: &[u8]) -> Option<Duration> {
    let seconds = std::str::from_utf8(header).ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    /// The random number that moves nothing.
    const EVEN: u32 = 50;

    #[test]
    fn waits_grow_from_half_a_second_to_the_interval() {
        let interval = Duration::from_secs(5);
        let waits: Vec<_> = (0..6).map(|failures| wait(interval, failures, None, EVEN).as_millis()).collect();
        assert_eq!(waits, [5000, 500, 1000, 2000, 4000, 5000]);
        assert_eq!(wait(interval, u32::MAX, None, EVEN), interval);
        assert_eq!(wait(Duration::from_millis(100), 1, None, EVEN), Duration::from_millis(100));
    }

    #[test]
    fn retry_after_is_obeyed_up_to_half_a_minute() {
        let interval = Duration::from_secs(5);
        for (header, expected) in
            [("7", 7000), ("30", 30_000), ("3600", 30_000), ("18446744073709551615", 30_000), ("0", 500), ("1", 1000)]
        {
            assert_eq!(wait(interval, 1, retry_after(header.as_bytes()), EVEN).as_millis(), expected, "{header}");
        }
        for header in ["", "-1", "soon", "Wed, 21 Oct 2026 07:28:00 GMT", "1.5", "99999999999999999999999"] {
            assert_eq!(retry_after(header.as_bytes()), None, "{header}");
        }
        assert_eq!(retry_after(b"\xff"), None);
    }

    #[test]
    fn jitter_is_even_and_small() {
        let waits: Vec<_> = (0..101).map(|random| wait(Duration::from_secs(5), 0, None, random).as_millis()).collect();
        assert_eq!((waits.iter().min(), waits.iter().max()), (Some(&4750), Some(&5250)));
        assert_eq!(waits.iter().sum::<u128>(), 5000 * 101);
    }
}
