//! Calls to Envoy: bytes in, bytes out, and no way to panic.
//!
//! The SDK's own wrappers panic on text that is not UTF-8 and on any status that they did not expect, and a panic ends
//! every stream of the worker. So the imports are declared here once more, with the status as the plain number that it
//! is. The one call that has to go through the SDK is [`dispatch`], for the SDK routes the answer by the token that only
//! it can file; it panics on statuses that Envoy does not give for that call.

#![allow(unsafe_code)] // The boundary to the host; everywhere else unsafe code is denied.

use std::time::Duration;

use log::{Level, LevelFilter, Log, Metadata, Record};

/// A proxy-wasm status other than 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("Envoy answered with status {0}")]
pub(super) struct HostStatus(pub(super) u32);

/// Status of a header, property or function that is not there.
const NOT_FOUND: u32 = 1;

/// Status of what is not in the form that it should have.
const PARSE_FAILURE: u32 = 4;

/// The maps and buffers that the filter reads (`proxy_map_type_t`, `proxy_buffer_type_t`).
mod kind {
    pub(super) const REQUEST_HEADERS: u32 = 0;
    pub(super) const RESPONSE_HEADERS: u32 = 2;
    pub(super) const CALL_RESPONSE_HEADERS: u32 = 6;
    pub(super) const CALL_RESPONSE_BODY: u32 = 4;
    pub(super) const PLUGIN_CONFIGURATION: u32 = 7;
}

#[rustfmt::skip]
#[cfg_attr(target_family = "wasm", link(wasm_import_module = "env"))]
unsafe extern "C" {
    fn proxy_log(level: u32, message: *const u8, size: usize) -> u32;
    fn proxy_get_log_level(level: *mut u32) -> u32;
    fn proxy_set_tick_period_milliseconds(period: u32) -> u32;
    fn proxy_get_buffer_bytes(kind: u32, start: usize, max: usize, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_get_header_map_value(map: u32, key: *const u8, key_size: usize, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_replace_header_map_value(map: u32, key: *const u8, key_size: usize, value: *const u8, value_size: usize) -> u32;
    fn proxy_add_header_map_value(map: u32, key: *const u8, key_size: usize, value: *const u8, value_size: usize) -> u32;
    fn proxy_get_header_map_pairs(map: u32, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_remove_header_map_value(map: u32, key: *const u8, key_size: usize) -> u32;
    fn proxy_get_property(path: *const u8, path_size: usize, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_set_property(path: *const u8, path_size: usize, value: *const u8, value_size: usize) -> u32;
    fn proxy_call_foreign_function(name: *const u8, name_size: usize, argument: *const u8, argument_size: usize, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_get_shared_data(key: *const u8, key_size: usize, data: *mut *mut u8, size: *mut usize, cas: *mut u32) -> u32;
    fn proxy_set_shared_data(key: *const u8, key_size: usize, value: *const u8, value_size: usize, cas: u32) -> u32;
    fn proxy_define_metric(kind: u32, name: *const u8, name_size: usize, metric: *mut u32) -> u32;
    fn proxy_increment_metric(metric: u32, by: i64) -> u32;
    fn proxy_continue_stream(stream: u32) -> u32;
    fn proxy_set_effective_context(context: u32) -> u32;
    fn proxy_send_local_response(status: u32, details: *const u8, details_size: usize, body: *const u8, body_size: usize, headers: *const u8, headers_size: usize, grpc_status: i32) -> u32;
}

/// WASI's monotonic clock on wasm, the emulated host's clock in native tests.
#[cfg(target_family = "wasm")]
pub(super) fn monotonic_now() -> Duration {
    #[link(wasm_import_module = "wasi_snapshot_preview1")]
    unsafe extern "C" {
        fn clock_time_get(clock: u32, precision: u64, nanoseconds: *mut u64) -> u32;
    }
    const MONOTONIC: u32 = 1;
    let mut nanoseconds = 0;
    // SAFETY: the pointer is to a live u64. On an error it stays 0: time stands still rather than the worker.
    let _status = unsafe { clock_time_get(MONOTONIC, 1, &raw mut nanoseconds) };
    Duration::from_nanos(nanoseconds)
}

/// WASI's monotonic clock on wasm, the emulated host's clock in native tests.
#[cfg(not(target_family = "wasm"))]
pub(super) fn monotonic_now() -> Duration {
    unsafe extern "C" {
        fn proxy_get_current_time_nanoseconds(nanoseconds: *mut u64) -> u32;
    }
    let mut nanoseconds = 0;
    // SAFETY: the pointer is to a live u64.
    let _status = unsafe { proxy_get_current_time_nanoseconds(&raw mut nanoseconds) };
    Duration::from_nanos(nanoseconds)
}

/// The bytes that a host call has handed over, in memory that it has taken from this VM's allocator.
struct Returned {
    data: *mut u8,
    size: usize,
}

impl Returned {
    const fn nothing() -> Self {
        Self { data: std::ptr::null_mut(), size: 0 }
    }

    /// `None` for a thing that is not there.
    fn into_option(self, status: u32) -> Result<Option<Vec<u8>>, HostStatus> {
        match status {
            0 if self.data.is_null() || self.size == 0 => Ok(Some(Vec::new())),
            // SAFETY: the host has obtained the memory from `proxy_on_memory_allocate(size)`, which leaks a boxed slice
            // of exactly `size` bytes, has filled it, and keeps no pointer to it.
            0 => Ok(Some(unsafe { Vec::from_raw_parts(self.data, self.size, self.size) })),
            NOT_FOUND => Ok(None),
            status => Err(HostStatus(status)),
        }
    }
}

const fn done(status: u32) -> Result<(), HostStatus> {
    if status == 0 { Ok(()) } else { Err(HostStatus(status)) }
}

fn header(map: u32, name: &str) -> Result<Option<Vec<u8>>, HostStatus> {
    let mut value = Returned::nothing();
    // SAFETY: `name` and both out-pointers are valid for the call.
    let status =
        unsafe { proxy_get_header_map_value(map, name.as_ptr(), name.len(), &raw mut value.data, &raw mut value.size) };
    value.into_option(status)
}

/// A request header; of several lines of one name the first, or all joined by commas: Envoy decides by the name. Only
/// while the request callback runs.
pub(super) fn request_header(name: &str) -> Result<Option<Vec<u8>>, HostStatus> {
    header(kind::REQUEST_HEADERS, name)
}

/// A response header.
pub(super) fn response_header(name: &str) -> Result<Option<Vec<u8>>, HostStatus> {
    header(kind::RESPONSE_HEADERS, name)
}

/// A header of the answer to a dispatched call. Only if the answer has headers at all.
pub(super) fn call_header(name: &str) -> Result<Option<Vec<u8>>, HostStatus> {
    header(kind::CALL_RESPONSE_HEADERS, name)
}

/// Sets a request header to one value, whatever the client sent under that name.
pub(super) fn set_request_header(name: &str, value: &str) -> Result<(), HostStatus> {
    // SAFETY: both strings are valid for the call.
    done(unsafe {
        proxy_replace_header_map_value(kind::REQUEST_HEADERS, name.as_ptr(), name.len(), value.as_ptr(), value.len())
    })
}

/// Adds a line to the request headers of a name.
pub(super) fn add_request_header(name: &str, value: &str) -> Result<(), HostStatus> {
    // SAFETY: both strings are valid for the call.
    done(unsafe {
        proxy_add_header_map_value(kind::REQUEST_HEADERS, name.as_ptr(), name.len(), value.as_ptr(), value.len())
    })
}

/// The names of all request headers, a name once for each line of it. A list that cannot be read is an error too.
pub(super) fn request_header_names() -> Result<Vec<Vec<u8>>, HostStatus> {
    let mut pairs = Returned::nothing();
    // SAFETY: both out-pointers are valid for the call.
    let status = unsafe { proxy_get_header_map_pairs(kind::REQUEST_HEADERS, &raw mut pairs.data, &raw mut pairs.size) };
    let bytes = pairs.into_option(status)?.unwrap_or_default();
    names_in_map(&bytes).ok_or(HostStatus(PARSE_FAILURE))
}

/// Removes all request headers of a name.
pub(super) fn remove_request_header(name: &str) -> Result<(), HostStatus> {
    // SAFETY: the string is valid for the call.
    match unsafe { proxy_remove_header_map_value(kind::REQUEST_HEADERS, name.as_ptr(), name.len()) } {
        NOT_FOUND => Ok(()),
        status => done(status),
    }
}

/// A property of the stream; `path` has its segments separated by NUL.
pub(super) fn property(path: &str) -> Result<Option<Vec<u8>>, HostStatus> {
    let mut value = Returned::nothing();
    // SAFETY: `path` and both out-pointers are valid for the call.
    let status = unsafe { proxy_get_property(path.as_ptr(), path.len(), &raw mut value.data, &raw mut value.size) };
    value.into_option(status)
}

/// Sets filter state, which Envoy's matchers see as `wasm.<key>`.
pub(super) fn set_filter_state(key: &str, value: &str) -> Result<(), HostStatus> {
    // SAFETY: both strings are valid for the call.
    done(unsafe { proxy_set_property(key.as_ptr(), key.len(), value.as_ptr(), value.len()) })
}

/// Makes Envoy pick the route again. An Envoy that does not know the function picks it again by itself.
pub(super) fn clear_route_cache() -> Result<(), HostStatus> {
    const NAME: &str = "clear_route_cache";
    let mut result = Returned::nothing();
    // SAFETY: the name and both out-pointers are valid for the call; there is no argument.
    let status = unsafe {
        proxy_call_foreign_function(
            NAME.as_ptr(),
            NAME.len(),
            std::ptr::null(),
            0,
            &raw mut result.data,
            &raw mut result.size,
        )
    };
    result.into_option(status).map(drop)
}

/// Answers the request in the apiserver's place. `details` appears as `%RESPONSE_CODE_DETAILS%`.
pub(super) fn send_local_response(
    status: u32,
    details: &str,
    headers: &[(&str, &[u8])],
    body: &[u8],
) -> Result<(), HostStatus> {
    const NO_GRPC_STATUS: i32 = -1;
    let headers = serialize_map(headers);
    // SAFETY: all four slices are valid for the call.
    done(unsafe {
        proxy_send_local_response(
            status,
            details.as_ptr(),
            details.len(),
            body.as_ptr(),
            body.len(),
            headers.as_ptr(),
            headers.len(),
            NO_GRPC_STATUS,
        )
    })
}

/// Lets a held answer go on as it is.
pub(super) fn continue_response() -> Result<(), HostStatus> {
    const RESPONSE: u32 = 1;
    // SAFETY: a number goes in and a number comes out.
    done(unsafe { proxy_continue_stream(RESPONSE) })
}

/// Makes the calls that follow, within the same callback, act on another context. Fails for a stream that is gone.
pub(super) fn set_effective_context(context: u32) -> Result<(), HostStatus> {
    // SAFETY: a number goes in and a number comes out.
    done(unsafe { proxy_set_effective_context(context) })
}

/// Logs what Envoy refuses, where nothing better can be done.
pub(super) fn log_failure(what: &str, outcome: Result<(), HostStatus>) {
    if let Err(status) = outcome {
        log::error!("{what}: {status}");
    }
}

/// proxy-wasm's form of a header list: the number of pairs, the lengths of each, then names and values, each with a NUL
/// behind it. Numbers are 32 bits, little-endian; a list that does not fit them is left empty.
fn serialize_map(pairs: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut push_number = |number: usize| match u32::try_from(number) {
        Ok(number) => {
            bytes.extend_from_slice(&number.to_le_bytes());
            Some(())
        }
        Err(_) => None,
    };
    let lengths = pairs.iter().flat_map(|(name, value)| [name.len(), value.len()]);
    if std::iter::once(pairs.len()).chain(lengths).try_for_each(&mut push_number).is_none() {
        return Vec::new();
    }
    for (name, value) in pairs {
        for text in [name.as_bytes(), value] {
            bytes.extend_from_slice(text);
            bytes.push(0);
        }
    }
    bytes
}

/// The names in proxy-wasm's form of a header list: see [`serialize_map`].
fn names_in_map(bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
    let (count, mut lengths) = bytes.split_first_chunk()?;
    let count = usize::try_from(u32::from_le_bytes(*count)).ok()?;
    let mut texts = lengths.get(count.checked_mul(8)?..)?;
    let mut names = Vec::with_capacity(count);
    for _ in 0..count {
        let (name, value);
        (name, lengths) = lengths.split_first_chunk()?;
        (value, lengths) = lengths.split_first_chunk()?;
        let length = |bytes: &[u8; 4]| usize::try_from(u32::from_le_bytes(*bytes)).ok();
        names.push(texts.get(..length(name)?)?.to_vec());
        let behind = length(name)?.checked_add(length(value)?)?.checked_add(2)?;
        texts = texts.get(behind..)?;
    }
    Some(names)
}

fn buffer(kind: u32, max: usize) -> Result<Vec<u8>, HostStatus> {
    let mut bytes = Returned::nothing();
    // SAFETY: both out-pointers are valid for the call.
    let status = unsafe { proxy_get_buffer_bytes(kind, 0, max, &raw mut bytes.data, &raw mut bytes.size) };
    bytes.into_option(status).map(Option::unwrap_or_default)
}

/// The plugin's configuration as Envoy has it, `size` bytes.
pub(super) fn plugin_configuration(size: usize) -> Result<Vec<u8>, HostStatus> {
    if size == 0 { Ok(Vec::new()) } else { buffer(kind::PLUGIN_CONFIGURATION, size) }
}

/// At most `max` bytes of the body that answers a dispatched call.
pub(super) fn call_body(max: usize) -> Result<Vec<u8>, HostStatus> {
    buffer(kind::CALL_RESPONSE_BODY, max)
}

/// A record that all VMs with this VM's id share, and the number to compare when it is written.
pub(super) fn shared_data(key: &str) -> Result<Option<(Vec<u8>, u32)>, HostStatus> {
    let (mut value, mut cas) = (Returned::nothing(), 0);
    // SAFETY: the key and all out-pointers are valid for the call.
    let status = unsafe {
        proxy_get_shared_data(key.as_ptr(), key.len(), &raw mut value.data, &raw mut value.size, &raw mut cas)
    };
    Ok(value.into_option(status)?.map(|bytes| (bytes, cas)))
}

/// Writes a shared record, with `cas` only if it is still the one that was read; whether it was.
pub(super) fn set_shared_data(key: &str, value: &[u8], cas: Option<u32>) -> Result<bool, HostStatus> {
    const CAS_MISMATCH: u32 = 8;
    const UNCONDITIONALLY: u32 = 0;
    let cas = cas.unwrap_or(UNCONDITIONALLY);
    // SAFETY: key and value are valid for the call.
    match unsafe { proxy_set_shared_data(key.as_ptr(), key.len(), value.as_ptr(), value.len(), cas) } {
        CAS_MISMATCH => Ok(false),
        status => done(status).map(|()| true),
    }
}

/// A counter among Envoy's statistics.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counter(Option<u32>);

impl Counter {
    /// Finds or makes the counter of a name. One that Envoy refuses counts nothing.
    pub(super) fn of(name: &str) -> Self {
        const COUNTER: u32 = 0;
        let mut metric = 0;
        // SAFETY: the name and the out-pointer are valid for the call.
        let outcome = done(unsafe { proxy_define_metric(COUNTER, name.as_ptr(), name.len(), &raw mut metric) });
        log_failure("defining a metric", outcome);
        Self(outcome.is_ok().then_some(metric))
    }

    /// Counts one more.
    pub(super) fn increment(self) {
        if let Self(Some(metric)) = self {
            // SAFETY: numbers go in and a number comes out.
            log_failure("counting", done(unsafe { proxy_increment_metric(metric, 1) }));
        }
    }
}

/// Asks for a tick every so often.
pub(super) fn set_tick_period(period: Duration) -> Result<(), HostStatus> {
    let milliseconds = u32::try_from(period.as_millis()).unwrap_or(u32::MAX);
    // SAFETY: a number goes in and a number comes out.
    done(unsafe { proxy_set_tick_period_milliseconds(milliseconds) })
}

/// Sends a request to a cluster; the answer comes to the context that runs now, under the token returned here.
pub(super) fn dispatch(cluster: &str, headers: Vec<(&str, &str)>, timeout: Duration) -> Result<u32, HostStatus> {
    proxy_wasm::hostcalls::dispatch_http_call(cluster, headers, None, Vec::new(), timeout)
        .map_err(|status| HostStatus(status as u32))
}

/// The header that makes a test build trap, in a request or in the answer to a poll.
#[cfg(feature = "trap-on-command")]
pub(super) const TRAP_HEADER: &str = "x-mixed-version-proxy-trap";

/// Ends this VM, as a defect would.
#[cfg(feature = "trap-on-command")]
#[allow(clippy::panic)] // What is asked for.
pub(super) fn trap_if(is_commanded: Result<Option<Vec<u8>>, HostStatus>) {
    if let Ok(Some(_)) = is_commanded {
        panic!("trapped on command");
    }
}

/// Sends log lines and the words of a panic to Envoy's log.
pub(super) fn install_logger() {
    // A second VM in one process of a native test finds the logger in place.
    let _already_set = log::set_logger(&EnvoyLog);
    log::set_max_level(LevelFilter::Info);
    #[cfg(target_family = "wasm")]
    std::panic::set_hook(Box::new(|panic| write_log(Level::Error, &format!("{panic}"))));
}

/// Takes over Envoy's log level, so that what Envoy would drop is not even formatted. Envoy does not answer this while a
/// module initializes.
pub(super) fn adopt_log_level() {
    let mut level = 0;
    // SAFETY: the pointer is to a live u32.
    let status = unsafe { proxy_get_log_level(&raw mut level) };
    log::set_max_level(match (status, level) {
        (0, 0) => LevelFilter::Trace,
        (0, 1) => LevelFilter::Debug,
        (0, 3) => LevelFilter::Warn,
        (0, 4..) => LevelFilter::Error,
        _ => LevelFilter::Info,
    });
}

fn write_log(level: Level, message: &str) {
    let level = match level {
        Level::Trace => 0,
        Level::Debug => 1,
        Level::Info => 2,
        Level::Warn => 3,
        Level::Error => 4,
    };
    // SAFETY: the message is valid for the call. A log that cannot be written is not worth more than the request.
    let _status = unsafe { proxy_log(level, message.as_ptr(), message.len()) };
}

struct EnvoyLog;

impl Log for EnvoyLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            write_log(record.level(), &format!("{}", record.args()));
        }
    }

    fn flush(&self) {}
}
