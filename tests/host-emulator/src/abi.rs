//! The boundary: the symbols that the guest imports, and those that it exports.

#![allow(unsafe_code)]

use std::borrow::Cow;

use crate::headers::Headers;
use crate::state::{self, HostCall, LocalReply, State, status};

/// All host functions, by the names under which they are counted and forced.
pub const FUNCTIONS: &[&str] = &[
    "proxy_log",
    "proxy_get_log_level",
    "proxy_get_current_time_nanoseconds",
    "proxy_set_tick_period_milliseconds",
    "proxy_get_buffer_bytes",
    "proxy_set_buffer_bytes",
    "proxy_get_header_map_pairs",
    "proxy_set_header_map_pairs",
    "proxy_get_header_map_value",
    "proxy_remove_header_map_value",
    "proxy_replace_header_map_value",
    "proxy_add_header_map_value",
    "proxy_get_property",
    "proxy_set_property",
    "proxy_get_shared_data",
    "proxy_set_shared_data",
    "proxy_register_shared_queue",
    "proxy_resolve_shared_queue",
    "proxy_dequeue_shared_queue",
    "proxy_enqueue_shared_queue",
    "proxy_continue_stream",
    "proxy_close_stream",
    "proxy_send_local_response",
    "proxy_http_call",
    "proxy_grpc_call",
    "proxy_grpc_stream",
    "proxy_grpc_send",
    "proxy_grpc_cancel",
    "proxy_grpc_close",
    "proxy_get_status",
    "proxy_set_effective_context",
    "proxy_call_foreign_function",
    "proxy_done",
    "proxy_define_metric",
    "proxy_get_metric",
    "proxy_record_metric",
    "proxy_increment_metric",
];

/// The callbacks of the guest.
pub(crate) mod guest {
    // SAFETY: these are safe Rust functions of the SDK, with these signatures (its `Action` is a u32), which take any
    // argument.
    unsafe extern "C" {
        #[link_name = "_initialize"]
        pub(crate) safe fn initialize();
        #[link_name = "proxy_on_memory_allocate"]
        pub(crate) safe fn memory_allocate(size: usize) -> *mut u8;
        #[link_name = "proxy_on_context_create"]
        pub(crate) safe fn context_create(context: u32, root: u32);
        #[link_name = "proxy_on_vm_start"]
        pub(crate) safe fn vm_start(context: u32, size: usize) -> bool;
        #[link_name = "proxy_on_configure"]
        pub(crate) safe fn configure(context: u32, size: usize) -> bool;
        #[link_name = "proxy_on_tick"]
        pub(crate) safe fn tick(context: u32);
        #[link_name = "proxy_on_queue_ready"]
        pub(crate) safe fn queue_ready(context: u32, queue: u32);
        #[link_name = "proxy_on_request_headers"]
        pub(crate) safe fn request_headers(context: u32, count: usize, end_of_stream: bool) -> u32;
        #[link_name = "proxy_on_response_headers"]
        pub(crate) safe fn response_headers(context: u32, count: usize, end_of_stream: bool) -> u32;
        #[link_name = "proxy_on_http_call_response"]
        pub(crate) safe fn http_call_response(context: u32, token: u32, headers: usize, body: usize, trailers: usize);
        #[link_name = "proxy_on_done"]
        pub(crate) safe fn done(context: u32) -> bool;
        #[link_name = "proxy_on_log"]
        pub(crate) safe fn log(context: u32);
        #[link_name = "proxy_on_delete"]
        pub(crate) safe fn delete(context: u32);
    }
}

/// Keeps a thread whose guest has panicked from aborting the process: it is stopped for good instead.
pub(crate) fn catch_aborts() {
    #[cfg(unix)]
    {
        use std::ffi::c_int;

        const SIGABRT: c_int = 6;

        // SAFETY: as in POSIX.
        unsafe extern "C" {
            fn signal(number: c_int, handler: extern "C" fn(c_int)) -> usize;
            fn pause() -> c_int;
        }

        extern "C" fn handler(_: c_int) {
            while crate::worker::trapped() {
                // SAFETY: it may be called in a signal handler.
                unsafe { pause() };
            }
            // Any other abort goes on.
        }

        // SAFETY: the handler does only what is allowed in one.
        unsafe { signal(SIGABRT, handler) };
    }
}

/// Runs a host function, counts it, and answers the status that a test has asked for instead if it has.
///
/// Outside of a VM every function fails.
fn call<R>(
    function: &'static str,
    subject: &str,
    copied: impl FnOnce(&R) -> Option<usize>,
    run: impl FnOnce(&mut State) -> Result<R, u32>,
) -> Result<R, u32> {
    let result = state::with(|state| {
        let result = match state.forced(function) {
            Some(status) => Err(status),
            None => run(state),
        };
        state.record(HostCall {
            function,
            subject: subject.to_owned(),
            status: result.as_ref().map_or_else(|status| *status, |_| status::OK),
            copied: result.as_ref().ok().and_then(copied),
        });
        result
    });
    result.unwrap_or(Err(status::INTERNAL_FAILURE))
}

fn nothing<R>(_: &R) -> Option<usize> {
    None
}

fn size(bytes: &impl AsRef<[u8]>) -> Option<usize> {
    let size = bytes.as_ref().len();
    (size > 0).then_some(size)
}

fn status_of(result: Result<(), u32>) -> u32 {
    result.err().unwrap_or(status::OK)
}

fn text(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

/// The bytes that the guest points to.
///
/// # Safety
/// `data` is null, or readable for `size` bytes until the host function returns.
unsafe fn bytes<'a>(data: *const u8, size: usize) -> &'a [u8] {
    if data.is_null() || size == 0 {
        &[]
    } else {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(data, size) }
    }
}

/// Writes a result where the guest wants it.
///
/// # Safety
/// `out` is null or writable.
unsafe fn put<T>(result: Result<T, u32>, out: *mut T) -> u32 {
    match result {
        Ok(value) => {
            if !out.is_null() {
                // SAFETY: the caller's promise.
                unsafe { out.write(value) };
            }
            status::OK
        }
        Err(status) => status,
    }
}

/// Copies a result into memory of the guest and writes where it is. No memory is allocated for nothing: null then.
///
/// # Safety
/// `data` and `size` are null or writable.
unsafe fn give(result: Result<Vec<u8>, u32>, data: *mut *mut u8, size: *mut usize) -> u32 {
    let value = match result {
        Ok(value) => value,
        Err(status) => return status,
    };
    let mut memory = std::ptr::null_mut();
    if !value.is_empty() {
        memory = guest::memory_allocate(value.len());
        if memory.is_null() {
            return status::INVALID_MEMORY_ACCESS;
        }
        // SAFETY: the guest has just allocated that many bytes.
        unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), memory, value.len()) };
    }
    // SAFETY: the caller's promise.
    unsafe {
        put(Ok(memory), data);
        put(Ok(value.len()), size)
    }
}

// SAFETY of all functions below: no other crate defines these symbols. The signatures are those of the SDK, whose enums
// are u32. The guest passes readable bytes and writable places, which are not kept beyond the call. None of them
// panics.

#[unsafe(no_mangle)]
extern "C" fn proxy_log(level: u32, message_data: *const u8, message_size: usize) -> u32 {
    // SAFETY: see above.
    let message = text(unsafe { bytes(message_data, message_size) });
    if state::with(|_| ()).is_none() {
        // A thread of the test, or one that is ending.
        eprintln!("[{level}] {message}");
        return status::OK;
    }
    status_of(call("proxy_log", &message, nothing, |state| state.log(level, &message)))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_get_log_level(return_level: *mut u32) -> u32 {
    let level = call("proxy_get_log_level", "", nothing, |state| Ok(state.log_level as u32));
    // SAFETY: see above.
    unsafe { put(level, return_level) }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_get_current_time_nanoseconds(return_time: *mut u64) -> u32 {
    let time = call("proxy_get_current_time_nanoseconds", "", nothing, |state| Ok(state.host.time().as_nanos() as u64));
    // SAFETY: see above.
    unsafe { put(time, return_time) }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_set_tick_period_milliseconds(period: u32) -> u32 {
    status_of(call("proxy_set_tick_period_milliseconds", &period.to_string(), nothing, |state| {
        state.tick_period(period)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_get_buffer_bytes(
    buffer_type: u32,
    start: usize,
    max_size: usize,
    return_data: *mut *mut u8,
    return_size: *mut usize,
) -> u32 {
    let result = call("proxy_get_buffer_bytes", &buffer_type.to_string(), size, |state| {
        state.buffer(buffer_type, start, max_size)
    });
    // SAFETY: see above.
    unsafe { give(result, return_data, return_size) }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_set_buffer_bytes(
    buffer_type: u32,
    _start: usize,
    _size: usize,
    _data: *const u8,
    _data_size: usize,
) -> u32 {
    status_of(call("proxy_set_buffer_bytes", &buffer_type.to_string(), nothing, |_| Err(status::BAD_ARGUMENT)))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_get_header_map_pairs(map_type: u32, return_data: *mut *mut u8, return_size: *mut usize) -> u32 {
    let result = call("proxy_get_header_map_pairs", &map_type.to_string(), size, |state| state.header_pairs(map_type));
    // SAFETY: see above.
    unsafe { give(result, return_data, return_size) }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_set_header_map_pairs(map_type: u32, map_data: *const u8, map_size: usize) -> u32 {
    // SAFETY: see above.
    let pairs = unsafe { bytes(map_data, map_size) };
    status_of(call("proxy_set_header_map_pairs", &map_type.to_string(), nothing, |state| {
        state.header_pairs_set(map_type, pairs)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_get_header_map_value(
    map_type: u32,
    key_data: *const u8,
    key_size: usize,
    return_data: *mut *mut u8,
    return_size: *mut usize,
) -> u32 {
    // SAFETY: see above.
    let name = text(unsafe { bytes(key_data, key_size) }).to_ascii_lowercase();
    let result = call("proxy_get_header_map_value", &name, size, |state| state.header_get(map_type, &name));
    // SAFETY: see above.
    unsafe { give(result, return_data, return_size) }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_remove_header_map_value(map_type: u32, key_data: *const u8, key_size: usize) -> u32 {
    // SAFETY: see above.
    let name = text(unsafe { bytes(key_data, key_size) }).to_ascii_lowercase();
    status_of(call("proxy_remove_header_map_value", &name, nothing, |state| state.header_remove(map_type, &name)))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_replace_header_map_value(
    map_type: u32,
    key_data: *const u8,
    key_size: usize,
    value_data: *const u8,
    value_size: usize,
) -> u32 {
    // SAFETY: see above.
    let (name, value) =
        unsafe { (text(bytes(key_data, key_size)).to_ascii_lowercase(), bytes(value_data, value_size)) };
    status_of(call("proxy_replace_header_map_value", &name, nothing, |state| state.header_set(map_type, &name, value)))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_add_header_map_value(
    map_type: u32,
    key_data: *const u8,
    key_size: usize,
    value_data: *const u8,
    value_size: usize,
) -> u32 {
    // SAFETY: see above.
    let (name, value) =
        unsafe { (text(bytes(key_data, key_size)).to_ascii_lowercase(), bytes(value_data, value_size)) };
    status_of(call("proxy_add_header_map_value", &name, nothing, |state| state.header_add(map_type, &name, value)))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_get_property(
    path_data: *const u8,
    path_size: usize,
    return_data: *mut *mut u8,
    return_size: *mut usize,
) -> u32 {
    // SAFETY: see above.
    let path = unsafe { bytes(path_data, path_size) };
    let subject = text(path).replace('\0', ".");
    let result = call("proxy_get_property", &subject, size, |state| state.property(path));
    // SAFETY: see above.
    unsafe { give(result, return_data, return_size) }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_set_property(
    path_data: *const u8,
    path_size: usize,
    value_data: *const u8,
    value_size: usize,
) -> u32 {
    // SAFETY: see above.
    let (path, value) = unsafe { (bytes(path_data, path_size), bytes(value_data, value_size)) };
    let subject = text(path).replace('\0', ".");
    status_of(call("proxy_set_property", &subject, nothing, |state| state.property_set(path, value)))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_get_shared_data(
    key_data: *const u8,
    key_size: usize,
    return_data: *mut *mut u8,
    return_size: *mut usize,
    return_cas: *mut u32,
) -> u32 {
    // SAFETY: see above.
    let key = unsafe { bytes(key_data, key_size) };
    let copied = |(value, _): &(Vec<u8>, u32)| size(value);
    match call("proxy_get_shared_data", &text(key), copied, |state| state.shared_get(key)) {
        // SAFETY: see above.
        Ok((value, cas)) => unsafe {
            put(Ok(cas), return_cas);
            give(Ok(value), return_data, return_size)
        },
        Err(status) => status,
    }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_set_shared_data(
    key_data: *const u8,
    key_size: usize,
    value_data: *const u8,
    value_size: usize,
    cas: u32,
) -> u32 {
    // SAFETY: see above.
    let (key, value) = unsafe { (bytes(key_data, key_size), bytes(value_data, value_size)) };
    status_of(call("proxy_set_shared_data", &text(key), nothing, |state| state.shared_set(key, value, cas)))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_register_shared_queue(name_data: *const u8, name_size: usize, return_id: *mut u32) -> u32 {
    // SAFETY: see above.
    let name = unsafe { bytes(name_data, name_size) };
    let id = call("proxy_register_shared_queue", &text(name), nothing, |state| state.queue_register(name));
    // SAFETY: see above.
    unsafe { put(id, return_id) }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_resolve_shared_queue(
    vm_id_data: *const u8,
    vm_id_size: usize,
    name_data: *const u8,
    name_size: usize,
    return_id: *mut u32,
) -> u32 {
    // SAFETY: see above.
    let (vm_id, name) = unsafe { (text(bytes(vm_id_data, vm_id_size)), bytes(name_data, name_size)) };
    let id = call("proxy_resolve_shared_queue", &text(name), nothing, |state| state.queue_resolve(&vm_id, name));
    // SAFETY: see above.
    unsafe { put(id, return_id) }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_dequeue_shared_queue(queue_id: u32, return_data: *mut *mut u8, return_size: *mut usize) -> u32 {
    let result = call("proxy_dequeue_shared_queue", &queue_id.to_string(), size, |state| {
        state.host.process().queue_pop(queue_id)
    });
    // SAFETY: see above.
    unsafe { give(result, return_data, return_size) }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_enqueue_shared_queue(queue_id: u32, value_data: *const u8, value_size: usize) -> u32 {
    // SAFETY: see above.
    let value = unsafe { bytes(value_data, value_size) };
    status_of(call("proxy_enqueue_shared_queue", &queue_id.to_string(), nothing, |state| {
        state.host.process().queue_push(queue_id, value)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_continue_stream(stream_type: u32) -> u32 {
    status_of(call("proxy_continue_stream", &stream_type.to_string(), nothing, |state| {
        state.continue_stream(stream_type)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_close_stream(stream_type: u32) -> u32 {
    status_of(call("proxy_close_stream", &stream_type.to_string(), nothing, |state| state.close_stream(stream_type)))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_send_local_response(
    status_code: u32,
    details_data: *const u8,
    details_size: usize,
    body_data: *const u8,
    body_size: usize,
    headers_data: *const u8,
    headers_size: usize,
    grpc_status: i32,
) -> u32 {
    // SAFETY: see above.
    let (details, body, headers) =
        unsafe { (bytes(details_data, details_size), bytes(body_data, body_size), bytes(headers_data, headers_size)) };
    status_of(call("proxy_send_local_response", &status_code.to_string(), nothing, |state| {
        state.local_reply(LocalReply {
            status: status_code,
            headers: Headers::deserialize(headers),
            body: body.to_vec(),
            details: details.to_vec(),
            grpc_status,
        })
    }))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_http_call(
    upstream_data: *const u8,
    upstream_size: usize,
    headers_data: *const u8,
    headers_size: usize,
    body_data: *const u8,
    body_size: usize,
    trailers_data: *const u8,
    trailers_size: usize,
    timeout: u32,
    return_token: *mut u32,
) -> u32 {
    // SAFETY: see above.
    let (upstream, headers, body, trailers) = unsafe {
        (
            text(bytes(upstream_data, upstream_size)),
            bytes(headers_data, headers_size),
            bytes(body_data, body_size),
            bytes(trailers_data, trailers_size),
        )
    };
    let token = call("proxy_http_call", &upstream, nothing, |state| {
        state.http_call(
            upstream.to_string(),
            Headers::deserialize(headers),
            body.to_vec(),
            Headers::deserialize(trailers),
            timeout,
        )
    });
    // SAFETY: see above.
    unsafe { put(token, return_token) }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_grpc_call(
    upstream_data: *const u8,
    upstream_size: usize,
    _service_data: *const u8,
    _service_size: usize,
    _method_data: *const u8,
    _method_size: usize,
    _metadata_data: *const u8,
    _metadata_size: usize,
    _message_data: *const u8,
    _message_size: usize,
    _timeout: u32,
    _return_token: *mut u32,
) -> u32 {
    // SAFETY: see above.
    let upstream = text(unsafe { bytes(upstream_data, upstream_size) });
    status_of(call("proxy_grpc_call", &upstream, nothing, |_| Err(status::INTERNAL_FAILURE)))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_grpc_stream(
    upstream_data: *const u8,
    upstream_size: usize,
    _service_data: *const u8,
    _service_size: usize,
    _method_data: *const u8,
    _method_size: usize,
    _metadata_data: *const u8,
    _metadata_size: usize,
    _return_token: *mut u32,
) -> u32 {
    // SAFETY: see above.
    let upstream = text(unsafe { bytes(upstream_data, upstream_size) });
    status_of(call("proxy_grpc_stream", &upstream, nothing, |_| Err(status::INTERNAL_FAILURE)))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_grpc_send(token: u32, _message: *const u8, _message_size: usize, _end_of_stream: bool) -> u32 {
    status_of(call("proxy_grpc_send", &token.to_string(), nothing, |_| Err(status::NOT_FOUND)))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_grpc_cancel(token: u32) -> u32 {
    status_of(call("proxy_grpc_cancel", &token.to_string(), nothing, |_| Err(status::NOT_FOUND)))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_grpc_close(token: u32) -> u32 {
    status_of(call("proxy_grpc_close", &token.to_string(), nothing, |_| Err(status::NOT_FOUND)))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_get_status(return_code: *mut u32, return_data: *mut *mut u8, return_size: *mut usize) -> u32 {
    let copied = |(_, message): &(u32, Vec<u8>)| size(message);
    match call("proxy_get_status", "", copied, |state| Ok(state.call_status.clone())) {
        // SAFETY: see above.
        Ok((code, message)) => unsafe {
            put(Ok(code), return_code);
            give(Ok(message), return_data, return_size)
        },
        Err(status) => status,
    }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_set_effective_context(context: u32) -> u32 {
    status_of(call("proxy_set_effective_context", &context.to_string(), nothing, |state| state.set_effective(context)))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_call_foreign_function(
    name_data: *const u8,
    name_size: usize,
    _arguments: *const u8,
    _arguments_size: usize,
    return_data: *mut *mut u8,
    return_size: *mut usize,
) -> u32 {
    // SAFETY: see above.
    let name = text(unsafe { bytes(name_data, name_size) });
    let result = call("proxy_call_foreign_function", &name, size, |state| state.foreign(&name));
    // SAFETY: see above.
    unsafe { give(result, return_data, return_size) }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_done() -> u32 {
    status_of(call("proxy_done", "", nothing, State::done))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_define_metric(
    metric_type: u32,
    name_data: *const u8,
    name_size: usize,
    return_id: *mut u32,
) -> u32 {
    // SAFETY: see above.
    let name = text(unsafe { bytes(name_data, name_size) });
    let id = call("proxy_define_metric", &name, nothing, |state| state.metric_define(metric_type, &name));
    // SAFETY: see above.
    unsafe { put(id, return_id) }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_get_metric(metric_id: u32, return_value: *mut u64) -> u32 {
    let value = call("proxy_get_metric", &metric_id.to_string(), nothing, |state| state.metric_get(metric_id));
    // SAFETY: see above.
    unsafe { put(value, return_value) }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_record_metric(metric_id: u32, value: u64) -> u32 {
    status_of(call("proxy_record_metric", &metric_id.to_string(), nothing, |state| {
        state.metric_record(metric_id, value)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_increment_metric(metric_id: u32, offset: i64) -> u32 {
    status_of(call("proxy_increment_metric", &metric_id.to_string(), nothing, |state| {
        state.metric_increment(metric_id, offset)
    }))
}
