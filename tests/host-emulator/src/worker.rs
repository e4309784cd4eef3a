//! The threads of VMs, and what becomes of a panic on them.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::mpsc::{self, Sender};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

use crate::abi::guest;
use crate::process::{Host, VmOptions};
use crate::state::{self, HostCall, Level, LogLine, State};
use crate::vm::Vm;

/// What the standard library says when a panic can not go on.
const GIVEN_UP: [&str; 2] = ["panic in a function that cannot unwind", "panic in a destructor during cleanup"];

/// How many of the last host calls a trap shows.
const HOST_CALLS_SHOWN: usize = 20;

/// A panic of the guest. Its VM is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trap {
    /// The panic's message and place; and the backtrace if `RUST_BACKTRACE` asks for it.
    pub message: String,
    /// The last host calls before it.
    pub host_calls: Vec<HostCall>,
    /// All that the VM had logged.
    pub logs: Vec<LogLine>,
}

impl fmt::Display for Trap {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "the guest panicked: {}", self.message)?;
        for call in &self.host_calls {
            write!(out, "\n  {}({}) -> {}", call.function, call.subject, call.status)?;
        }
        Ok(())
    }
}

impl std::error::Error for Trap {}

type Job = Box<dyn FnOnce(&mut Vm) + Send>;
type Listener = Box<dyn Fn(Trap)>;
type Hook = Box<dyn Fn(&PanicHookInfo<'_>) + Sync + Send>;

enum Answer<R> {
    Done(R),
    Panicked(Box<dyn Any + Send>),
    Trapped(Trap),
}

thread_local! {
    /// How deep this thread is in callbacks of the guest.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// A panic of the guest that may become a trap: unless the guest catches it.
    static PENDING: Cell<Option<Trap>> = const { Cell::new(None) };
    static TRAPPED: Cell<bool> = const { Cell::new(false) };
    /// Who is to hear of a trap.
    static LISTENER: RefCell<Option<Listener>> = const { RefCell::new(None) };
}

/// The hook that was there before; it serves the panics outside the guest.
static ORIGINAL: OnceLock<Hook> = OnceLock::new();

/// Runs a callback of the guest.
pub(crate) fn in_guest<R>(callback: impl FnOnce() -> R) -> R {
    DEPTH.set(DEPTH.get() + 1);
    let result = callback();
    DEPTH.set(DEPTH.get() - 1);
    result
}

fn hook(info: &PanicHookInfo<'_>) {
    if DEPTH.try_with(Cell::get).unwrap_or(0) == 0 {
        if let Some(original) = ORIGINAL.get() {
            original(info);
        }
        return;
    }
    let text = info.payload_as_str().unwrap_or("no message");
    if GIVEN_UP.contains(&text) {
        // The panic has reached the callback's `extern "C"` frame, or a destructor panicked as well: the process is
        // about to abort, in which this thread will be stopped.
        if let Some(trap) = PENDING.take() {
            TRAPPED.set(true);
            LISTENER.with_borrow(|listener| {
                if let Some(listener) = listener {
                    listener(trap);
                }
            });
        }
        return;
    }
    let mut message = text.to_owned();
    if let Some(place) = info.location() {
        message.push_str(&format!(", at {place}"));
    }
    let critical = LogLine { level: Level::Critical, message: message.clone() };
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        message.push_str(&format!("\n{backtrace}"));
    }
    let (host_calls, logs) = state::with(|state| {
        // As the SDK's own hook would.
        state.logs.push(critical);
        let skipped = state.host_calls.len().saturating_sub(HOST_CALLS_SHOWN);
        (state.host_calls.iter().skip(skipped).cloned().collect(), state.logs.clone())
    })
    .unwrap_or_default();
    PENDING.set(Some(Trap { message, host_calls, logs }));
}

/// Initializes the guest on this thread, and has panics come here.
fn initialize() {
    // The SDK's `set_log_level` is not fit for two threads at once.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    if ORIGINAL.get().is_none() {
        let _ = ORIGINAL.set(panic::take_hook());
        crate::abi::catch_aborts();
        keep_hook();
    }
    guest::initialize();
    keep_hook();
}

/// Takes the panic hook, which the guest may have replaced: `set_log_level` does so the first time.
pub(crate) fn keep_hook() {
    panic::set_hook(Box::new(hook));
}

/// Whether this thread's guest has panicked, and nothing must run here any more.
pub(crate) fn trapped() -> bool {
    TRAPPED.try_with(Cell::get).unwrap_or(false)
}

/// A VM on a thread of its own, which runs a closure at a time. The VM ends when this is dropped.
pub struct Worker {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    trap: Mutex<Option<Trap>>,
}

impl Worker {
    pub(crate) fn start(host: Host, options: VmOptions) -> Self {
        let (jobs, queue) = mpsc::channel::<Job>();
        let thread = thread::spawn(move || {
            state::install(State::new(host, options));
            initialize();
            let mut vm = Vm::new();
            for job in queue {
                job(&mut vm);
            }
        });
        Self { jobs: Some(jobs), thread: Some(thread), trap: Mutex::new(None) }
    }

    /// Runs a closure in the VM and waits for it. A trap of the guest is the error, now and ever after; any other
    /// panic goes on here.
    pub fn run<R, F>(&self, run: F) -> Result<R, Trap>
    where
        R: Send + 'static,
        F: FnOnce(&mut Vm) -> R + Send + 'static,
    {
        if let Some(trap) = self.trap() {
            return Err(trap);
        }
        let (sender, receiver) = mpsc::channel();
        let job = Box::new(move |vm: &mut Vm| {
            let traps = sender.clone();
            LISTENER.set(Some(Box::new(move |trap| {
                let _ = traps.send(Answer::Trapped(trap));
            })));
            let answer = match panic::catch_unwind(AssertUnwindSafe(|| run(vm))) {
                Ok(result) => Answer::Done(result),
                Err(payload) => Answer::Panicked(payload),
            };
            LISTENER.set(None);
            let _ = sender.send(answer);
        });
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        assert!(sent, "the thread of the VM has ended");
        match receiver.recv() {
            Ok(Answer::Done(result)) => Ok(result),
            Ok(Answer::Panicked(payload)) => panic::resume_unwind(payload),
            Ok(Answer::Trapped(trap)) => {
                *self.trap.lock().unwrap_or_else(PoisonError::into_inner) = Some(trap.clone());
                Err(trap)
            }
            Err(_) => panic!("the thread of the VM has ended"),
        }
    }

    /// The trap that ended the VM, if one did.
    pub fn trap(&self) -> Option<Trap> {
        self.trap.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if self.trap().is_none()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}
