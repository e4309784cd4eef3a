//! The process: what its VMs share.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::state::status;
use crate::vm::Vm;
use crate::worker::{Trap, Worker};

/// 2026-01-01T00:00:00Z: where the clock starts.
const START: Duration = Duration::from_secs(1_767_225_600);

/// What `proxy_get_header_map_value` answers for a header that occurs several times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RepeatedHeaders {
    /// The values joined with a comma (what is seen of headers that Envoy joins on arrival, such as `accept`).
    #[default]
    Joined,
    /// The first value only (what is seen of all other headers in Envoys whose getter does not join).
    First,
}

/// The kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// Can be set.
    Gauge,
    /// A distribution.
    Histogram,
}

/// A metric of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name, without a prefix.
    pub name: String,
    /// Its kind.
    pub kind: MetricKind,
    /// The value of a counter or gauge.
    pub value: u64,
    /// The recorded values of a histogram.
    pub samples: Vec<u64>,
}

/// How a VM is started.
#[derive(Clone, Debug, Default)]
pub struct VmOptions {
    /// The identity that scopes shared data and queues.
    pub vm_id: String,
    /// The VM configuration, which `on_vm_start` can read.
    pub vm_configuration: Vec<u8>,
}

/// An emulated Envoy process. Clones are the same process.
#[derive(Clone)]
pub struct Host(Arc<Mutex<Process>>);

pub(crate) struct Process {
    pub(crate) now: Duration,
    pub(crate) repeated: RepeatedHeaders,
    next_vm: u64,
    next_cas: u32,
    next_queue: u32,
    shared: HashMap<(String, Vec<u8>), (Vec<u8>, u32)>,
    queue_ids: HashMap<(String, Vec<u8>), u32>,
    queues: HashMap<u32, Queue>,
    mail: HashMap<u64, VecDeque<(u32, u32)>>,
    pub(crate) metrics: BTreeMap<(MetricKind, String), Metric>,
}

struct Queue {
    data: VecDeque<Vec<u8>>,
    vm: u64,
    context: u32,
}

impl Process {
    pub(crate) fn shared_get(&self, vm_id: &str, key: &[u8]) -> Result<(Vec<u8>, u32), u32> {
        self.shared.get(&(vm_id.to_owned(), key.to_vec())).cloned().ok_or(status::NOT_FOUND)
    }

    pub(crate) fn shared_set(&mut self, vm_id: &str, key: &[u8], value: &[u8], cas: u32) -> Result<(), u32> {
        let key = (vm_id.to_owned(), key.to_vec());
        // A missing key takes any cas.
        if self.shared.get(&key).is_some_and(|(_, current)| cas != 0 && cas != *current) {
            return Err(status::CAS_MISMATCH);
        }
        self.next_cas += 1;
        self.shared.insert(key, (value.to_vec(), self.next_cas));
        Ok(())
    }

    /// The last to register a queue is the one that is called.
    pub(crate) fn queue_register(&mut self, vm_id: &str, name: &[u8], vm: u64, context: u32) -> u32 {
        let next = self.next_queue + 1;
        let id = *self.queue_ids.entry((vm_id.to_owned(), name.to_vec())).or_insert(next);
        self.next_queue = self.next_queue.max(id);
        let queue = self.queues.entry(id).or_insert_with(|| Queue { data: VecDeque::new(), vm, context });
        (queue.vm, queue.context) = (vm, context);
        id
    }

    pub(crate) fn queue_resolve(&self, vm_id: &str, name: &[u8]) -> Result<u32, u32> {
        self.queue_ids.get(&(vm_id.to_owned(), name.to_vec())).copied().ok_or(status::NOT_FOUND)
    }

    pub(crate) fn queue_push(&mut self, id: u32, value: &[u8]) -> Result<(), u32> {
        let queue = self.queues.get_mut(&id).ok_or(status::NOT_FOUND)?;
        queue.data.push_back(value.to_vec());
        self.mail.entry(queue.vm).or_default().push_back((queue.context, id));
        Ok(())
    }

    pub(crate) fn queue_pop(&mut self, id: u32) -> Result<Vec<u8>, u32> {
        self.queues.get_mut(&id).ok_or(status::NOT_FOUND)?.data.pop_front().ok_or(status::EMPTY)
    }

    pub(crate) fn next_mail(&mut self, vm: u64) -> Option<(u32, u32)> {
        self.mail.get_mut(&vm)?.pop_front()
    }

    pub(crate) fn mail_count(&self, vm: u64) -> usize {
        self.mail.get(&vm).map_or(0, VecDeque::len)
    }

    pub(crate) fn allocate_vm(&mut self) -> u64 {
        self.next_vm += 1;
        self.next_vm
    }
}

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}

impl Host {
    /// A process of its own, with nothing stored and its clock at the start of 2026.
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(Process {
            now: START,
            repeated: RepeatedHeaders::default(),
            next_vm: 0,
            next_cas: 0,
            next_queue: 0,
            shared: HashMap::new(),
            queue_ids: HashMap::new(),
            queues: HashMap::new(),
            mail: HashMap::new(),
            metrics: BTreeMap::new(),
        })))
    }

    /// Runs a closure in a fresh VM. A trap of the guest is the error; any other panic goes on here.
    pub fn vm<R, F>(&self, run: F) -> Result<R, Trap>
    where
        R: Send + 'static,
        F: FnOnce(&mut Vm) -> R + Send + 'static,
    {
        self.worker().run(run)
    }

    /// Starts a VM that takes closures one after the other.
    pub fn worker(&self) -> Worker {
        self.worker_with(VmOptions::default())
    }

    /// [`Host::worker`] with an identity and a configuration of the VM.
    pub fn worker_with(&self, options: VmOptions) -> Worker {
        Worker::start(self.clone(), options)
    }

    /// The time since 1970.
    pub fn time(&self) -> Duration {
        self.process().now
    }

    /// Sets the clock. Nothing is run: timers that have become due are run by [`Vm::run_until`].
    pub fn set_time(&self, now: Duration) {
        self.process().now = now;
    }

    /// Moves the clock on; see [`Host::set_time`].
    pub fn advance(&self, by: Duration) {
        self.process().now += by;
    }

    /// Chooses how repeated headers are read.
    pub fn set_repeated_headers(&self, repeated: RepeatedHeaders) {
        self.process().repeated = repeated;
    }

    /// A value and its cas in the shared data of the default VM identity.
    pub fn shared_data(&self, key: impl AsRef<[u8]>) -> Option<(Vec<u8>, u32)> {
        self.process().shared_get("", key.as_ref()).ok()
    }

    /// Stores a value in the shared data of the default VM identity.
    pub fn set_shared_data(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) {
        // Without a cas it cannot fail.
        let _ = self.process().shared_set("", key.as_ref(), value.as_ref(), 0);
    }

    /// All shared data of all VM identities, sorted: identity, key, value.
    pub fn all_shared_data(&self) -> Vec<(String, Vec<u8>, Vec<u8>)> {
        let mut all: Vec<_> = self
            .process()
            .shared
            .iter()
            .map(|((vm_id, key), (value, _))| (vm_id.clone(), key.clone(), value.clone()))
            .collect();
        all.sort();
        all
    }

    /// All metrics, by kind and name.
    pub fn metrics(&self) -> Vec<Metric> {
        self.process().metrics.values().cloned().collect()
    }

    /// The value of the counter or gauge of that name; 0 when there is none.
    pub fn metric(&self, name: &str) -> u64 {
        self.process().metrics.values().find(|metric| metric.name == name).map_or(0, |metric| metric.value)
    }

    pub(crate) fn process(&self) -> MutexGuard<'_, Process> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
