//! The root context: configuration, ticks, polls and their answers.

use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::ContextType;

use super::host;
use super::http::{Http, Shared};
use crate::config::Config;
use crate::decision::LOOP_HEADER;
use crate::discovery::document::{Half, POLL_ACCEPT};
use crate::peers::refresh::{Answer, Event, PollError, Question, QuestionId, Refresh};
use crate::peers::table::{Table, View};

/// How often the root looks whether a poll is due. Well below any sensible refresh interval, and 5 wake-ups a second of
/// an idle worker cost nothing that could be measured.
const TICK: Duration = Duration::from_millis(200);

/// One configuration of the filter on one worker.
#[derive(Default)]
pub(super) struct Root {
    configured: Option<Configured>,
}

struct Configured {
    shared: Rc<Shared>,
    refresh: Refresh,
    /// Polls on their way, by the token of their call.
    calls: HashMap<u32, QuestionId>,
}

impl Context for Root {
    fn on_http_call_response(&mut self, token: u32, headers: usize, _body_size: usize, _trailers: usize) {
        if let Some(configured) = &mut self.configured {
            configured.answered(token, headers);
        }
    }
}

impl RootContext for Root {
    fn on_configure(&mut self, size: usize) -> bool {
        host::adopt_log_level();
        let parsed = host::plugin_configuration(size)
            .map_err(|status| format!("configuration cannot be read: {status}"))
            .and_then(|bytes| Config::parse(&bytes).map_err(|error| format!("configuration refused: {error}")));
        match parsed {
            Ok(config) => {
                self.configured = Some(Configured::new(config));
                true
            }
            Err(error) => {
                log::error!("{error}");
                false
            }
        }
    }

    fn on_tick(&mut self) {
        if let Some(configured) = &mut self.configured {
            configured.poll(host::monotonic_now());
        }
    }

    fn create_http_context(&self, _context_id: u32) -> Option<Box<dyn HttpContext>> {
        // Envoy starts no stream before the configuration was accepted; if it did, the request would pass untouched.
        Some(Box::new(Http::new(self.configured.as_ref().map(|configured| Rc::clone(&configured.shared)))))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}

impl Configured {
    fn new(config: Config) -> Self {
        let discovery = &config.discovery;
        if let Err(status) = host::set_tick_period(TICK.min(discovery.refresh_interval)) {
            log::error!("no ticks, so no apiserver can be polled: {status}");
        }
        let refresh = Refresh::new(
            config.apiservers.len(),
            discovery.refresh_interval,
            discovery.timeout,
            discovery.max_document_bytes,
        );
        Self { shared: Rc::new(Shared::new(config)), refresh, calls: HashMap::new() }
    }

    /// Sends the polls that are due and gives up those whose answer got lost.
    fn poll(&mut self, now: Duration) {
        for id in self.refresh.lost(now) {
            self.calls.retain(|_, awaited| *awaited != id);
            self.take(id, Answer::Failed(PollError::Lost));
        }
        for question in self.refresh.due(now) {
            match self.dispatch(&question) {
                Ok(token) => {
                    self.calls.insert(token, question.id);
                }
                Err(error) => self.take(question.id, Answer::Failed(error)),
            }
        }
    }

    fn dispatch(&self, question: &Question) -> Result<u32, PollError> {
        let config = &self.shared.config;
        let cluster = config.apiservers.get(question.id.apiserver).map_or("", |peer| peer.discovery_cluster.as_str());
        let mut headers = vec![
            (":method", "GET"),
            (":path", question.id.half.path()),
            (":authority", config.discovery.authority.as_str()),
            ("accept", POLL_ACCEPT),
            // An apiserver that proxies to peers, or an Envoy with this filter, then answers for itself alone.
            (LOOP_HEADER, "true"),
        ];
        if let Some(etag) = &question.if_none_match {
            headers.push(("if-none-match", etag));
        }
        host::dispatch(cluster, headers, config.discovery.timeout)
            .map_err(|status| PollError::NotDispatched { cluster: cluster.to_owned(), host_status: status.0 })
    }

    fn answered(&mut self, token: u32, headers: usize) {
        let Some(id) = self.calls.remove(&token) else { return };
        // A call that failed has no headers, and Envoy has none to be asked for.
        if headers == 0 {
            return self.take(id, Answer::Failed(PollError::Reset));
        }
        // One byte more than allowed is enough to tell that there is more.
        let limit = self.shared.config.discovery.max_document_bytes.saturating_add(1);
        let header = |name| host::call_header(name).ok().flatten();
        let status = header(":status").as_deref().and_then(parse_status).unwrap_or_default();
        let body = if status == 200 { host::call_body(limit) } else { Ok(Vec::new()) };
        let (content_type, etag) = (header("content-type").unwrap_or_default(), header("etag"));
        match body {
            Ok(body) => {
                let answer =
                    Answer::Response { status, content_type: &content_type, etag: etag.as_deref(), body: &body };
                self.take(id, answer);
            }
            Err(status) => self.take(id, Answer::Failed(PollError::Unreadable { host_status: status.0 })),
        }
    }

    /// Hands an answer to the state machine, and what has changed to the streams.
    fn take(&mut self, id: QuestionId, answer: Answer<'_>) {
        let change = self.refresh.answered(id, answer);
        let name = self.shared.config.apiservers.get(id.apiserver).map_or("", |peer| peer.name.as_str());
        match change.event {
            Some(Event::Failing(error)) => log::warn!("discovery of {name} ({}) fails: {error}", id.half.path()),
            Some(Event::Recovered) => log::info!("discovery of {name} ({}) is fresh", id.half.path()),
            None => {}
        }
        if change.document {
            let table = Table::build(self.refresh.documents(), &self.shared.exclusions);
            self.show(Rc::new(table));
        } else if change.health {
            self.show(Rc::clone(&self.shared.view().table));
        }
    }

    fn show(&self, table: Rc<Table>) {
        let (core, groups) = (self.refresh.health(Half::Core), self.refresh.health(Half::Groups));
        self.shared.set_view(View { table, core, groups });
    }
}

/// A status code as Envoy writes it: three digits.
pub(super) fn parse_status(text: &[u8]) -> Option<u16> {
    std::str::from_utf8(text).ok()?.parse().ok()
}
