//! The root context: configuration, ticks, questions and their answers.

use std::collections::HashMap;
use std::rc::Rc;

use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::ContextType;

use super::host;
use super::http::Http;
use super::state::Shared;
use crate::config::Config;
use crate::decision::LOOP_HEADER;
use crate::peers::refresh::{Answer, Event, PollError, Question, QuestionId};

/// One configuration of the filter on one worker.
pub(super) struct Root {
    id: u32,
    configured: Option<Configured>,
}

struct Configured {
    shared: Rc<Shared>,
    /// Questions on their way, by the token of their call.
    calls: HashMap<u32, QuestionId>,
}

impl Root {
    pub(super) const fn new(id: u32) -> Self {
        Self { id, configured: None }
    }
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
                let shared = Rc::new(Shared::new(config, self.id));
                self.configured = Some(Configured { shared, calls: HashMap::new() });
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
            configured.tick();
        }
    }

    fn create_http_context(&self, context_id: u32) -> Option<Box<dyn HttpContext>> {
        // Envoy starts no stream before the configuration was accepted; if it did, the request would pass untouched.
        let shared = self.configured.as_ref().map(|configured| Rc::clone(&configured.shared));
        if let Some(shared) = &shared {
            shared.note_request();
        }
        Some(Box::new(Http::new(context_id, shared)))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}

impl Configured {
    fn tick(&mut self) {
        self.shared.stand();
        self.shared.lose_patience();
        for id in self.shared.lost() {
            self.calls.retain(|_, awaited| *awaited != id);
            self.take(id, Answer::Failed(PollError::Lost));
        }
        for question in self.shared.due() {
            match self.dispatch(&question) {
                Ok(token) => {
                    self.calls.insert(token, question.id);
                }
                Err(error) => self.take(question.id, Answer::Failed(error)),
            }
        }
        self.shared.publish();
    }

    fn dispatch(&self, question: &Question) -> Result<u32, PollError> {
        let config = &self.shared.config;
        let subject = question.id.subject;
        let cluster = config.apiservers.get(question.id.apiserver).map_or("", |peer| peer.discovery_cluster.as_str());
        let mut headers = vec![
            (":method", "GET"),
            (":path", subject.path()),
            (":authority", config.discovery.authority.as_str()),
            ("accept", subject.accept()),
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
        #[cfg(feature = "trap-on-command")]
        host::trap_if(host::call_header(host::TRAP_HEADER));
        let header = |name| host::call_header(name).ok().flatten();
        let status = header(":status").as_deref().and_then(parse_status).unwrap_or_default();
        let body = if status == 200 { host::call_body(self.shared.read_limit()) } else { Ok(Vec::new()) };
        let (content_type, etag, retry_after) =
            (header("content-type").unwrap_or_default(), header("etag"), header("retry-after"));
        self.take(
            id,
            match &body {
                Ok(body) => Answer::Response {
                    status,
                    content_type: &content_type,
                    etag: etag.as_deref(),
                    retry_after: retry_after.as_deref(),
                    body,
                },
                Err(status) => Answer::Failed(PollError::Unreadable { host_status: status.0 }),
            },
        );
    }

    fn take(&self, id: QuestionId, answer: Answer<'_>) {
        let (name, path) = (self.shared.name_of(id.apiserver), id.subject.path());
        match self.shared.answered(id, answer).event {
            Some(Event::Failing(error)) => log::warn!("discovery of {name} ({path}) fails: {error}"),
            Some(Event::Recovered) => log::info!("discovery of {name} ({path}) is fresh"),
            None => {}
        }
    }
}

/// A status code as Envoy writes it: three digits.
pub(super) fn parse_status(text: &[u8]) -> Option<u16> {
    std::str::from_utf8(text).ok()?.parse().ok()
}
