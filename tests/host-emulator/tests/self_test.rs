//! The emulator against a small guest, which does what a request's `x-do` header says.

use std::time::Duration;

use host_emulator::{
    Action, Answer, Headers, Host, HttpCall, Level, MetricKind, Progress, RepeatedHeaders, VmOptions, status,
};

/// The guest.
mod guest {
    use std::time::Duration;

    use proxy_wasm::hostcalls;
    use proxy_wasm::traits::{Context, HttpContext, RootContext};
    use proxy_wasm::types::{Action, BufferType, ContextType, LogLevel, MapType, MetricType};

    proxy_wasm::main! {{
        proxy_wasm::set_log_level(LogLevel::Trace);
        proxy_wasm::set_root_context(|id| Box::new(Root { id, held: Vec::new() }));
    }}

    const MILLISECOND: Duration = Duration::from_millis(1);

    struct Root {
        id: u32,
        held: Vec<u32>,
    }

    struct Stream {
        id: u32,
    }

    /// Puts what was found where the test looks: the log.
    fn say(what: impl std::fmt::Debug) {
        log::info!("{what:?}");
    }

    fn dispatch(cluster: &str, path: &str, body: Option<&[u8]>) -> Result<u32, proxy_wasm::types::Status> {
        let headers = vec![(":method", "GET"), (":path", path), (":authority", "a")];
        hostcalls::dispatch_http_call(cluster, headers, body, vec![("t", "1")], 500 * MILLISECOND)
    }

    impl Context for Root {
        fn on_http_call_response(&mut self, token: u32, headers: usize, body: usize, trailers: usize) {
            say((token, headers, body, trailers));
            if headers == 0 {
                say(hostcalls::get_grpc_status());
                say(self.get_http_call_response_body(0, 10));
                return;
            }
            say(self.get_http_call_response_header(":status"));
            say(self.get_http_call_response_headers());
            say(self.get_http_call_response_body(1, 3).map(|body| String::from_utf8(body).unwrap()));
            say(self.get_http_call_response_body(100, 3));
            for stream in self.held.drain(..) {
                match hostcalls::set_effective_context(stream) {
                    Ok(()) if body == 0 => hostcalls::send_http_response(503, vec![], Some(b"held")).unwrap(),
                    Ok(()) => hostcalls::resume_http_response().unwrap(),
                    Err(status) => say(status),
                }
            }
        }

        fn on_done(&mut self) -> bool {
            say("done");
            false
        }
    }

    impl RootContext for Root {
        fn on_vm_start(&mut self, size: usize) -> bool {
            say((size, hostcalls::get_buffer(BufferType::VmConfiguration, 0, size).unwrap()));
            true
        }

        fn on_configure(&mut self, size: usize) -> bool {
            let configuration = self.get_plugin_configuration().unwrap_or_default();
            assert_eq!(configuration.len(), size);
            let queue = hostcalls::register_shared_queue(&format!("queue of {}", self.id)).unwrap();
            say(queue);
            hostcalls::set_tick_period(100 * MILLISECOND).unwrap();
            configuration != b"bad"
        }

        fn on_tick(&mut self) {
            let now = hostcalls::get_current_time().unwrap().duration_since(std::time::UNIX_EPOCH).unwrap();
            say(("tick", now.as_millis() % 1000));
            if let (Some(value), cas) = self.get_shared_data("ticks") {
                self.set_shared_data("ticks", Some(&[value[0] + 1]), cas).unwrap();
            }
            if self.get_shared_data("dispatch").0.is_some() {
                say(dispatch("upstream", "/tick", Some(b"body")));
            }
            if self.get_shared_data("trap").0.is_some() {
                panic!("as the test wants");
            }
            if self.get_shared_data("finish").0.is_some() {
                hostcalls::done().unwrap();
            }
        }

        fn on_queue_ready(&mut self, queue: u32) {
            while let Some(value) = self.dequeue_shared_queue(queue).unwrap() {
                let stream = u32::from_le_bytes(value.try_into().unwrap());
                say(("asked by", stream));
                self.held.push(stream);
            }
            say(dispatch("upstream", "/queue", None));
        }

        fn create_http_context(&self, id: u32) -> Option<Box<dyn HttpContext>> {
            Some(Box::new(Stream { id }))
        }

        fn get_type(&self) -> Option<ContextType> {
            Some(ContextType::HttpContext)
        }
    }

    impl Context for Stream {
        fn on_done(&mut self) -> bool {
            say("stream done");
            true
        }
    }

    impl HttpContext for Stream {
        fn on_http_request_headers(&mut self, count: usize, end_of_stream: bool) -> Action {
            let what = self.get_http_request_header("X-Do").unwrap_or_default();
            match what.as_str() {
                "look" => {
                    say((count, end_of_stream, self.get_http_request_header("absent")));
                    say(self.get_http_request_header("twice"));
                    say(self.get_http_request_header("empty"));
                    say(self.get_http_request_headers());
                    say(self.get_http_response_headers());
                    say(self.get_property(vec!["request", "path"]).map(|path| String::from_utf8(path).unwrap()));
                    say(self.get_property(vec!["xds", "cluster_name"]));
                    say(self.get_property(vec!["no", "such"]));
                }
                "reroute" => {
                    self.set_property(vec!["cluster"], Some(b"peer"));
                    say(self.get_property(vec!["cluster"]).map(|value| String::from_utf8(value).unwrap()));
                    say(self.call_foreign_function("clear_route_cache", None));
                    say(self.call_foreign_function("no such", None));
                }
                "change" => {
                    self.set_http_request_header("twice", Some("once"));
                    self.add_http_request_header("new", "1");
                    self.add_http_request_header("new", "2");
                    self.set_http_request_header("x-do", None);
                }
                "reply" => {
                    self.send_http_response(404, vec![("content-type", "application/json")], Some(b"{}"));
                    // Whatever is returned, the stream stops here.
                }
                "reply twice" => {
                    self.send_http_response(404, vec![], None);
                    self.send_http_response(405, vec![], None);
                }
                "metrics" => {
                    let counter = hostcalls::define_metric(MetricType::Counter, "counter").unwrap();
                    let gauge = hostcalls::define_metric(MetricType::Gauge, "gauge").unwrap();
                    let histogram = hostcalls::define_metric(MetricType::Histogram, "histogram").unwrap();
                    say((counter, gauge, histogram));
                    hostcalls::increment_metric(counter, 2).unwrap();
                    say(hostcalls::increment_metric(counter, 0));
                    hostcalls::record_metric(gauge, 7).unwrap();
                    hostcalls::increment_metric(gauge, -1).unwrap();
                    hostcalls::record_metric(histogram, 9).unwrap();
                    say((hostcalls::get_metric(counter), hostcalls::get_metric(gauge)));
                    say((hostcalls::get_metric(histogram), hostcalls::get_metric(400)));
                }
                "shared" => {
                    say(self.get_shared_data("key"));
                    self.set_shared_data("key", Some(b"1"), Some(77)).unwrap();
                    let (_, cas) = self.get_shared_data("key");
                    self.set_shared_data("key", Some(b"2"), cas).unwrap();
                    say(self.set_shared_data("key", Some(b"3"), cas));
                    self.set_shared_data("key", None, None).unwrap();
                    say(self.get_shared_data("key").0);
                    say(self.resolve_shared_queue("", "nobody's"));
                    say(self.enqueue_shared_queue(99, None));
                    say(self.dequeue_shared_queue(99));
                    say(hostcalls::get_log_level());
                    say(hostcalls::cancel_grpc_call(1));
                }
                "dispatch" => say((dispatch("upstream", "/a", None), dispatch("other", "/b", None))),
                "hold" => return Action::Pause,
                _ => {}
            }
            Action::Continue
        }

        fn on_http_response_headers(&mut self, count: usize, end_of_stream: bool) -> Action {
            say((count, end_of_stream, self.get_http_response_header(":status")));
            say(self.get_property(vec!["response", "code_details"]).map(|value| String::from_utf8(value).unwrap()));
            match self.get_http_response_header("x-do").unwrap_or_default().as_str() {
                "reply" => self.send_http_response(503, vec![("retry-after", "1")], Some(b"sorry")),
                "header" => self.set_http_response_header("x-new", Some("1")),
                "hold" => {
                    let queue = self.resolve_shared_queue("", "queue of 1").unwrap();
                    self.enqueue_shared_queue(queue, Some(&self.id.to_le_bytes())).unwrap();
                    return Action::Pause;
                }
                "request" => say(hostcalls::get_map(MapType::HttpRequestHeaders).unwrap()),
                "trap" => say(self.get_http_request_header(":path")),
                "resume" => self.resume_http_request(),
                _ => {}
            }
            Action::Continue
        }

        fn on_log(&mut self) {
            say(("log", self.get_http_request_header(":path"), self.get_http_response_header(":status")));
        }
    }
}

const PATH: [(&str, &str); 3] = [(":method", "GET"), (":path", "/p"), (":authority", "a")];

fn doing(what: &str) -> Headers {
    Headers::from(PATH).with("x-do", what)
}

fn said(vm: &mut host_emulator::Vm) -> Vec<String> {
    vm.take_logs().into_iter().map(|line| line.message).collect()
}

fn in_vm(run: impl FnOnce(&mut host_emulator::Vm, host_emulator::RootId) + Send + 'static) {
    let done = Host::new().vm(|vm| {
        let root = vm.configure("{}").unwrap();
        said(vm);
        run(vm, root);
    });
    if let Err(trap) = done {
        panic!("{trap}");
    }
}

#[test]
fn configures() {
    let worker = Host::new().worker_with(VmOptions { vm_id: "v".into(), vm_configuration: b"vm".to_vec() });
    worker
        .run(|vm| {
            let root = vm.configure("").unwrap();
            assert_eq!(said(vm), ["(2, Some([118, 109]))", "1"]);
            assert_eq!(vm.tick_period(root), Some(Duration::from_millis(100)));
            assert_eq!(vm.configure("bad"), None);
            assert_eq!(vm.roots(), [root]);
            assert!(vm.configure("other").is_some());
            assert!(!vm.shutdown(root));
            vm.host().set_shared_data("finish", "not this VM's");
            vm.tick(root);
            assert_eq!(vm.roots().len(), 2);
        })
        .unwrap();
}

#[test]
fn shuts_down() {
    in_vm(|vm, root| {
        assert!(!vm.shutdown(root));
        vm.host().set_shared_data("finish", "now");
        vm.tick(root);
        assert_eq!(vm.roots(), []);
    });
}

#[test]
fn shows_the_request() {
    in_vm(|vm, root| {
        let headers = doing("look").with("Twice", "a").with("twice", "b").with("empty", "");
        let outcome = vm.request(root, &headers, true);
        assert_eq!((outcome.action, outcome.request), (Action::Continue, Progress::Passed));
        assert_eq!(outcome.request_headers, headers);
        let said = said(vm);
        assert_eq!(said[..3], ["(7, true, None)", r#"Some("a,b")"#, r#"Some("")"#]);
        assert!(said[3].contains(r#"("twice", "a"), ("twice", "b")"#), "{}", said[3]);
        assert_eq!(said[4..], ["[]", r#"Some("/p")"#, "None", "None"]);

        vm.host().set_repeated_headers(RepeatedHeaders::First);
        vm.request_with(root, headers, [("xds.cluster_name", "c"), ("request.path", "/q")], false);
        let said = self::said(vm);
        assert_eq!((&*said[0], &*said[1]), ("(7, false, None)", r#"Some("a")"#));
        assert_eq!(said[5..7], [r#"Some("/q")"#, "Some([99])"]);
    });
}

#[test]
fn changes_requests_and_reroutes() {
    in_vm(|vm, root| {
        let outcome = vm.request(root, doing("reroute"), true);
        assert_eq!(outcome.filter_state_text("cluster"), Some("peer"));
        assert_eq!(outcome.route_cache_cleared, 1);
        assert_eq!(said(vm), [r#"Some("peer")"#, "Ok(None)", "Err(NotFound)"]);
        let outcome = vm.request(root, doing("change").with("twice", "a").with("twice", "b"), true);
        let expected = Headers::from(PATH).with("twice", "once").with("new", "1").with("new", "2");
        assert_eq!(outcome.request_headers, expected);
        assert_eq!(outcome.route_cache_cleared, 4);
    });
}

#[test]
fn replies_from_the_request_and_reenters() {
    in_vm(|vm, root| {
        let outcome = vm.request(root, doing("reply"), true);
        assert_eq!((outcome.action, outcome.request), (Action::Pause, Progress::Replied));
        assert_eq!(outcome.response, Progress::Replied);
        let reply = outcome.local_reply.unwrap();
        assert_eq!((reply.status, reply.text().as_str()), (404, "{}"));
        assert_eq!(reply.headers, Headers::from([("content-type", "application/json")]));
        let through = [(":status", "404"), ("content-type", "application/json"), ("content-length", "2")];
        assert_eq!(outcome.response_headers, through.into());
        assert_eq!(said(vm), [r#"(3, false, Some("404"))"#, "None"]);
        vm.finish(outcome.stream);
        assert_eq!(said(vm), [r#"("log", Some("/p"), Some("404"))"#, r#""stream done""#]);
        assert_eq!(vm.streams(), []);
    });
}

#[test]
#[should_panic = "a second local reply (405)"]
fn a_second_reply_fails_the_test() {
    in_vm(|vm, root| {
        vm.request(root, doing("reply twice"), true);
    });
}

#[test]
fn misuse_can_be_tolerated() {
    in_vm(|vm, root| {
        vm.tolerate_misuse();
        let outcome = vm.request(root, doing("reply twice"), true);
        assert_eq!(outcome.local_reply.unwrap().status, 404);
        assert_eq!(vm.misuse().len(), 1);
        let stream = vm.request(root, PATH, true).stream;
        vm.response(stream, [(":status", "200"), ("x-do", "resume")], ());
        assert_eq!(vm.misuse().len(), 2);
    });
}

#[test]
fn responses_pass_or_are_replaced() {
    in_vm(|vm, root| {
        let stream = vm.request(root, PATH, true).stream;
        let outcome =
            vm.response(stream, [(":status", "200"), ("x-do", "header")], [("response.code_details", "via_upstream")]);
        assert_eq!((outcome.action, outcome.response), (Action::Continue, Progress::Passed));
        assert_eq!(outcome.response_headers.text("x-new"), Some("1"));
        assert_eq!(said(vm), [r#"(2, false, Some("200"))"#, r#"Some("via_upstream")"#]);

        let stream = vm.request(root, PATH, true).stream;
        let outcome = vm.response_with(stream, [(":status", "503"), ("x-do", "reply")], (), true);
        assert_eq!((outcome.action, outcome.response), (Action::Pause, Progress::Replied));
        assert_eq!(outcome.local_reply.unwrap().headers, [("retry-after", "1")].into());
        assert_eq!(said(vm), [r#"(2, true, Some("503"))"#, "None"]);

        // The request headers are gone: the list is empty, and asking for one is fatal with the SDK.
        let stream = vm.request(root, PATH, true).stream;
        vm.response(stream, [(":status", "200"), ("x-do", "request")], ());
        assert_eq!(said(vm).last().unwrap(), "[]");
    });
}

#[test]
fn a_request_is_held_and_times_out() {
    in_vm(|vm, root| {
        let outcome = vm.request(root, doing("hold"), true);
        assert_eq!((outcome.action, outcome.request), (Action::Pause, Progress::Held));
        let outcome = vm.response(outcome.stream, [(":status", "504"), ("x-do", "resume")], ());
        assert_eq!((outcome.request, outcome.response), (Progress::Passed, Progress::Passed));
    });
}

#[test]
fn a_panic_of_the_guest_is_a_trap() {
    let host = Host::new();
    let worker = host.worker();
    let root = worker.run(|vm| vm.configure("").unwrap()).unwrap();
    let trap = worker
        .run(move |vm| {
            let stream = vm.request(root, PATH, true).stream;
            vm.response(stream, [(":status", "200"), ("x-do", "trap")], ());
        })
        .unwrap_err();
    assert!(trap.message.contains("unexpected status: 2"), "{trap}");
    assert_eq!(trap.host_calls.last().unwrap().subject, ":path");
    assert_eq!(trap.logs.last().unwrap().level, Level::Critical);
    assert_eq!(worker.run(|_| ()).unwrap_err(), trap);

    // Others live on, and new ones start.
    host.set_shared_data("trap", "1");
    let trap = host.vm(|vm| {
        let root = vm.configure("").unwrap();
        vm.run_for(Duration::from_secs(1));
        root
    });
    assert!(trap.unwrap_err().to_string().contains("as the test wants"));
}

#[test]
fn an_assertion_is_no_trap() {
    let result = std::panic::catch_unwind(|| Host::new().vm(|_| panic!("of the test")));
    assert_eq!(*result.unwrap_err().downcast::<&str>().unwrap(), "of the test");
}

#[test]
fn ticks_at_its_period() {
    in_vm(|vm, root| {
        vm.host().set_shared_data("ticks", [0]);
        vm.run_for(Duration::from_millis(250));
        assert_eq!(said(vm), [r#"("tick", 100)"#, r#"("tick", 200)"#]);
        vm.advance(Duration::from_millis(500));
        assert!(said(vm).is_empty());
        vm.run_until(vm.time());
        assert_eq!(said(vm), [r#"("tick", 750)"#]);
        assert_eq!(vm.next_tick(root), Some(vm.time() + Duration::from_millis(100)));
        assert_eq!(vm.host().shared_data("ticks").unwrap().0, [3]);
    });
}

#[test]
fn calls_are_answered() {
    in_vm(|vm, root| {
        vm.host().set_shared_data("dispatch", "1");
        vm.tick(root);
        let calls = vm.calls();
        let [HttpCall { token: 1, .. }] = &calls[..] else { panic!("{calls:?}") };
        assert_eq!((calls[0].path(), calls[0].context, calls[0].root), ("/tick", root.0, root));
        assert_eq!(calls[0].headers.text("content-length"), Some("4"));
        assert_eq!(calls[0].trailers, [("t", "1")].into());
        assert_eq!(calls[0].deadline(), Some(vm.time() + Duration::from_millis(500)));
        said(vm);
        vm.answer(1, 200, [("etag", "x")], "answer");
        assert_eq!(
            said(vm)[1..],
            [r#"Some("200")"#, r#"[(":status", "200"), ("etag", "x")]"#, r#"Some("nsw")"#, "None"]
        );
        vm.tick(root);
        said(vm);
        vm.fail(2);
        assert_eq!(said(vm), ["(2, 0, 0, 0)", r#"Ok((11, Some("reset")))"#, "None"]);
        vm.tick(root);
        vm.answer_raw(3, [("a", "b")], "", [("c", "d")], (5, 6, 7));
        assert!(said(vm).contains(&"(3, 5, 6, 7)".to_owned()));

        // Open for longer than its timeout; the others are answered at once.
        vm.tick(root);
        said(vm);
        let mut seen = 0;
        vm.run_for_with(Duration::from_millis(550), |call| {
            seen += 1;
            (call.token != 4).then(|| Answer::new(200, (), "{}"))
        });
        assert_eq!(seen, 6);
        assert!(said(vm).contains(&r#"Some("504")"#.to_owned()));
        assert!(vm.calls().is_empty());
    });
}

#[test]
fn calls_are_refused() {
    in_vm(|vm, root| {
        vm.refuse_calls_to("other");
        vm.request(root, doing("dispatch"), true);
        vm.accept_calls_to("other");
        vm.know_clusters(["upstream"]);
        let stream = vm.request(root, doing("dispatch"), true).stream;
        assert_eq!(said(vm), ["(Ok(1), Err(InternalFailure))", "(Ok(2), Err(BadArgument))"]);
        assert_eq!(vm.calls()[1].context, stream.0);
        // The answer to a stream that is gone reaches nobody.
        vm.finish(stream);
        said(vm);
        vm.answer(2, 200, (), "");
        assert!(said(vm).is_empty());
    });
}

#[test]
fn a_response_is_held_while_the_root_asks() {
    in_vm(|vm, root| {
        let held = |vm: &mut host_emulator::Vm| {
            let stream = vm.request(root, PATH, true).stream;
            vm.response(stream, [(":status", "404"), ("x-do", "hold")], ()).stream
        };
        let (first, gone) = (held(vm), held(vm));
        assert_eq!(vm.stream(first).response, Progress::Held);
        assert_eq!(vm.undelivered(), 2);
        vm.finish(gone);
        assert_eq!(vm.deliver(), 2);
        said(vm);
        vm.answer(1, 200, (), "{}");
        assert_eq!(vm.stream(first).response, Progress::Passed);
        assert_eq!(said(vm).last().unwrap(), "BadArgument");

        let second = held(vm);
        vm.deliver();
        vm.answer(3, 200, (), "");
        let outcome = vm.stream(second);
        assert_eq!(outcome.response, Progress::Replied);
        assert_eq!(outcome.local_reply.unwrap().text(), "held");
    });
}

#[test]
fn shared_data_queues_and_the_rest() {
    in_vm(|vm, root| {
        vm.request(root, doing("shared"), true);
        let said = said(vm);
        let expected =
            ["(None, None)", "Err(CasMismatch)", "None", "None", "Err(NotFound)", "Err(NotFound)", "Ok(Trace)"];
        assert_eq!(said[..7], expected);
        assert_eq!(said[7], "Err(NotFound)");
    });
}

#[test]
fn metrics_are_shared() {
    let host = Host::new();
    for _ in 0..2 {
        host.vm(|vm| {
            let root = vm.configure("").unwrap();
            vm.request(root, doing("metrics"), true);
            assert_eq!(said(vm)[2..4], ["(4, 9, 14)", "Err(BadArgument)"]);
        })
        .unwrap();
    }
    assert_eq!((host.metric("counter"), host.metric("gauge")), (4, 6));
    let histogram = host.metrics().into_iter().find(|metric| metric.kind == MetricKind::Histogram).unwrap();
    assert_eq!(histogram.samples, [9, 9]);
}

#[test]
fn host_calls_are_counted_and_forced() {
    in_vm(|vm, root| {
        vm.take_host_calls();
        vm.request(root, PATH, true);
        let calls = vm.take_host_calls();
        assert_eq!(calls.len(), 1);
        assert_eq!((calls[0].function, &*calls[0].subject), ("proxy_get_header_map_value", "x-do"));
        assert_eq!((calls[0].status, calls[0].copied), (status::NOT_FOUND, None));

        vm.force_status_times("proxy_get_header_map_value", status::NOT_FOUND, 1);
        vm.request(root, doing("reply"), true);
        assert_eq!(vm.count("proxy_send_local_response"), 0);
        vm.request(root, doing("reply"), true);
        assert_eq!(vm.count("proxy_send_local_response"), 1);

        vm.force_status("proxy_http_call", status::INTERNAL_FAILURE);
        said(vm);
        vm.request(root, doing("dispatch"), true);
        vm.clear_forced();
        vm.request(root, doing("dispatch"), true);
        assert_eq!(said(vm), ["(Err(InternalFailure), Err(InternalFailure))", "(Ok(1), Ok(2))"]);
    });
}

#[test]
fn two_vms_step_in_turn() {
    let host = Host::new();
    host.set_shared_data("ticks", [0]);
    let workers = [host.worker(), host.worker()];
    let roots = workers.each_ref().map(|worker| worker.run(|vm| vm.configure("").unwrap()).unwrap());
    for _ in 0..3 {
        for (worker, root) in workers.iter().zip(roots) {
            worker.run(move |vm| vm.tick(root)).unwrap();
        }
    }
    assert_eq!(host.shared_data("ticks").unwrap().0, [6]);

    // Both registered the same name: the last one hears.
    let hold = move |vm: &mut host_emulator::Vm| {
        let stream = vm.request(roots[0], PATH, true).stream;
        vm.response(stream, [(":status", "404"), ("x-do", "hold")], ());
        vm.deliver()
    };
    assert_eq!(workers[0].run(hold).unwrap(), 0);
    assert_eq!(workers[1].run(|vm| vm.deliver()).unwrap(), 1);
}
