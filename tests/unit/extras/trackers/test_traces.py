"""Episodes as OpenTelemetry traces: what a collector receives, and which episodes it receives."""

import base64
import gzip
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random

import pytest
import run_samples

from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.trackers.episode_trace import Origin, episode_spans
from openenv_pipe.runs.eval_report import summarise
from openenv_pipe.runs.evals import Evaluation
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.trackers import delivery
from openenv_pipe.trackers.build import Trackers, check_tracker
from openenv_pipe.types import Finish, Group, Judgement, Status, Step
from tests.fakes import all_episodes, collect, made_up_episode, made_up_turn, tiny_policy

HOSTILE = "<script>alert(1)</script> \x1b[31m [red] \ud800 "
TIMES = [100.5, 101.0, 101.25, 102.0]
ASKED = {"role": "user", "content": "find it"}


@pytest.fixture
def collector():
    """A collector of OTLP over HTTP, with what it has received and the answers that it gives."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.paths.append(self.path)
            server.headers.append(dict(self.headers))
            status = server.statuses.pop(0) if server.statuses else 200
            if self.path.endswith("/ingestion"):
                server.batches.append(json.loads(body)["batch"])
                self.send_response(207)
                self.end_headers()
                self.wfile.write(json.dumps({"successes": [], "errors": server.rejected}).encode())
                return
            if status == 200:
                request = ExportTraceServiceRequest.FromString(gzip.decompress(body))
                for resource in request.resource_spans:
                    server.resources.append(values(resource.resource.attributes))
                    for scope in resource.scope_spans:
                        server.spans += scope.spans
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.paths, server.headers, server.statuses, server.spans = [], [], [], []
    server.resources, server.batches, server.rejected = [], [], []
    server.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def values(attributes):
    """Attributes by name."""

    def plain(value):
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [plain(each) for each in value.array_value.values]
        return getattr(value, kind)

    return {each.key: plain(each.value) for each in attributes}


def played(reward=0.75, reply=HOSTILE):
    """An episode of two turns: two tool calls, then an unusable reply."""
    steps = [
        Step(action={"tool_name": "search", "arguments": {"q": "x"}}, observation={"hits": 3}),
        Step(action={"tool_name": "open"}, observation={"text": HOSTILE}, reward=0.25),
    ]
    turns = [
        made_up_turn(
            [1, 2, 3], [4, 5], reply="calls two", steps=steps, times_s=TIMES, messages=[ASKED]
        ),
        made_up_turn(
            [6],
            [7, 8, 9],
            reply=reply,
            messages=[{"role": "tool", "content": "3 hits"}, {"role": "tool", "content": HOSTILE}],
            steps=[],
            unusable="no call",
            finish=Finish.LENGTH,
            times_s=[102.0, 103.0],
        ),
    ]
    episode = made_up_episode(reward, turns=turns)
    episode.first_observation = {"prompt": "find it"}
    episode.reward_terms = {"env": 0.25, "ruler": 0.5}
    episode.judgements = {"ruler": Judgement(explanation="it came closer")}
    episode.started_s, episode.duration_s = 100.0, 3.5
    return episode


def group_of(*episodes):
    for member, episode in enumerate(episodes):
        episode.member = member
    return Group(id="7", task=episodes[0].task, episodes=[*episodes])


def send(tmp_path, url, groups, *overrides, steps=(1,), notify=pytest.fail):
    settings = ["tracker=otlp", f"tracker.otlp.endpoint={url}", *overrides]
    send_to(tmp_path, groups, *settings, steps=steps, notify=notify)


def tracking(tmp_path, *overrides, notify=pytest.fail):
    """The trackers of a run with these overrides, and its folder."""
    config = compose(["conf=smoke", f"runs_dir={tmp_path}", *overrides]).config
    folder = RunFolder.create(config, overrides=[], command=[])
    return Trackers(config, folder, notify), folder


def send_to(tmp_path, groups, *overrides, steps=(1,), notify=pytest.fail):
    trackers, _ = tracking(tmp_path, *overrides, notify=notify)
    for step in steps:
        trackers.log({"step": step, "stage": "grpo", "reward/mean": 1.0}, groups)
    trackers.close("finished", {})


def test_an_episode_is_a_tree_of_an_agent_model_calls_and_tool_calls(tmp_path, collector):
    send(tmp_path, collector.url, [group_of(played())])
    assert collector.paths == ["/v1/traces"]
    assert collector.resources == [{"service.name": "openenv-pipe"}]
    root, first, search, opened, second = collector.spans
    names = [each.name for each in collector.spans]
    tools = ["execute_tool search", "execute_tool open"]
    assert names == ["invoke_agent wordle", "chat tiny", *tools, "chat tiny"]
    assert len({each.trace_id for each in collector.spans}) == 1
    assert len({each.span_id for each in collector.spans}) == 5
    assert root.parent_span_id == b""
    assert {each.parent_span_id for each in collector.spans[1:]} == {root.span_id}
    times = [
        (each.start_time_unix_nano / 1e9, each.end_time_unix_nano / 1e9) for each in collector.spans
    ]
    assert times == [(100, 103.5), (100.5, 101), (101, 101.25), (101.25, 102), (102, 103)]
    assert [each.kind for each in collector.spans] == [1, 3, 1, 1, 3]  # internal and client
    assert [each.status.code for each in collector.spans] == [0, 0, 0, 0, 2]
    assert second.status.message == "no call"
    agent = values(root.attributes)
    assert agent["gen_ai.operation.name"] == "invoke_agent"
    assert agent["gen_ai.agent.name"] == "wordle"
    assert agent["gen_ai.conversation.id"] == "smoke/0001/1/7/0"
    assert (agent["gen_ai.usage.input_tokens"], agent["gen_ai.usage.output_tokens"]) == (9, 5)
    assert agent["openenv_pipe.reward"] == 0.75
    assert agent["openenv_pipe.reward.ruler"] == 0.5
    assert (agent["openenv_pipe.step"], agent["openenv_pipe.success"]) == (1, False)
    lengths = [values(each.attributes)["gen_ai.usage.input_tokens"] for each in (first, second)]
    assert lengths == [3, 3 + 2 + 1]
    call = values(first.attributes)
    assert call["gen_ai.operation.name"] == "chat"
    assert call["gen_ai.provider.name"] == "openenv_pipe.local"
    assert call["gen_ai.response.finish_reasons"] == ["stop"]
    assert call["openenv_pipe.policy_versions"] == [0]
    (told,) = json.loads(call["gen_ai.input.messages"])
    assert told == {"role": "user", "parts": [{"type": "text", "content": "find it"}]}
    tool = values(search.attributes)
    assert tool["gen_ai.operation.name"] == "execute_tool"
    assert tool["gen_ai.tool.name"] == "search"
    assert json.loads(tool["gen_ai.tool.call.arguments"])["arguments"] == {"q": "x"}
    assert json.loads(tool["gen_ai.tool.call.result"]) == {"hits": 3}
    assert values(opened.attributes)["openenv_pipe.reward"] == 0.25
    scores = {
        each["gen_ai.evaluation.name"]: each for each in (values(e.attributes) for e in root.events)
    }
    assert {name: each["gen_ai.evaluation.score.value"] for name, each in scores.items()} == {
        "reward": 0.75,
        "success": 0.0,
        "env": 0.25,
        "ruler": 0.5,
    }
    assert scores["ruler"]["gen_ai.evaluation.explanation"] == "it came closer"


def test_an_episode_that_a_judge_left_without_a_reward_has_none_in_its_trace(tmp_path, collector):
    episode = played()
    episode.reward, episode.unscored = 0.0, "the judge is silent"
    send(tmp_path, collector.url, [group_of(episode)])
    agent = values(collector.spans[0].attributes)
    assert (agent["openenv_pipe.is_scored"], agent.get("openenv_pipe.reward")) == (False, None)


def test_hostile_text_is_written_out_and_shortened(tmp_path, collector):
    send(tmp_path, collector.url, [group_of(played(reply=HOSTILE + "x" * 5_000_000))])
    second = values(collector.spans[-1].attributes)
    (reply,) = json.loads(second["gen_ai.output.messages"])
    text = reply["parts"][0]["content"]
    assert text.startswith("<script>alert(1)</script> \\u001b[31m [red] \\ud800 x")
    assert len(text) < 21_000
    assert "more characters" in text
    heard = json.loads(second["gen_ai.input.messages"])
    assert [each["role"] for each in heard] == ["tool", "tool"]


def test_tool_calls_in_messages_are_shortened_and_have_no_secrets(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "a secret of the program")
    call = json.dumps({"name": "write", "arguments": {"text": "x" * 100_000}})
    calls = ['{"name": "ask", "arguments": {"key": "a secret of the program"}}', call]
    asked = {"role": "assistant", "content": "", "calls": calls}
    turn = made_up_turn([1], [2], reply="go", messages=[asked])
    origin = Origin(run="r", environment="e", provider="p", model="m", step=1, now_s=0.0)
    _, chat, *_ = episode_spans(origin, "3/0", made_up_episode(1.0, turns=[turn]))
    told = chat.attributes["gen_ai.input.messages"]
    assert "a secret" not in told and "<hidden: MY_API_KEY>" in told
    assert len(told) < 25_000


def test_of_a_step_a_sample_up_to_the_cap_is_sent_and_always_the_same(tmp_path, collector):
    def sent(*overrides):
        collector.spans.clear()
        groups = [group_of(*(played(reward) for reward in range(40)))]
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        send(folder, collector.url, groups, *overrides)
        return {each.trace_id for each in collector.spans}

    assert len(sent("tracker.otlp.max_per_step=100")) == 40
    some = sent("tracker.otlp.sample_rate=0.5", "tracker.otlp.max_per_step=100")
    assert 8 < len(some) < 32
    assert some == sent("tracker.otlp.sample_rate=0.5", "tracker.otlp.max_per_step=100")
    few = sent("tracker.otlp.sample_rate=0.5", "tracker.otlp.max_per_step=3")
    assert len(few) == 3
    assert few < some
    assert sent("tracker.otlp.sample_rate=0.0") == set()


def test_episodes_of_evaluations_are_traced_as_such(tmp_path, collector):
    overrides = ["tracker=otlp", f"tracker.otlp.endpoint={collector.url}"]
    trackers, folder = tracking(tmp_path, *overrides, "tracker.otlp.max_per_step=3")
    config = folder.written_config
    groups = [group_of(*(played(reward) for reward in range(5)))]
    trackers.log({"step": 4, "stage": "grpo", "reward/mean": 1.0}, groups)
    for label, step, model in (
        ("baseline_random", None, "random"),
        ("start", 0, "tiny"),
        ("during_000004", 4, "tiny"),
    ):
        episodes = groups[0].episodes
        facts = {"reward": config.reward, "model": model, "step": step, "temperature": 1.0}
        report = summarise(label, episodes, config.eval, config.seed, **facts)
        trackers.log_evaluation(Evaluation(report=report, groups=groups))
    trackers.close("finished", {})
    agents = [values(each.attributes) for each in collector.spans if not each.parent_span_id]
    assert len(agents) == 4 * 3, "the cap is that of each step and of each evaluation"
    assert len({each.trace_id for each in collector.spans}) == 4 * 3
    names = ("session.id", "openenv_pipe.evaluation", "openenv_pipe.step")
    assert [tuple(each.get(name) for name in names) for each in agents[::3]] == [
        ("smoke/0001/4", None, 4),
        ("smoke/0001/eval/baseline_random/0", "baseline_random", None),
        ("smoke/0001/eval/start/0", "start", 0),
        ("smoke/0001/eval/during_000004/4", "during_000004", 4),
    ]
    kinds = [(each["gen_ai.provider.name"], each["gen_ai.request.model"]) for each in agents[::3]]
    assert kinds[1:3] == [("openenv_pipe.scripted", "random"), ("openenv_pipe.local", "tiny")]


def test_a_rejected_request_is_told_and_sent_again(tmp_path, collector, monkeypatch):
    monkeypatch.setattr(delivery, "FIRST_DELAY_S", 0.001)
    collector.statuses += [400]
    told = []
    settings = ["tracker=otlp", f"tracker.otlp.endpoint={collector.url}"]
    trackers, _ = tracking(tmp_path, *settings, notify=told.append)
    for step in (1, 2):
        trackers.log({"step": step, "stage": "grpo"}, [group_of(played())])
    for _ in range(6000):
        if len({each.trace_id for each in collector.spans}) == 2:
            break
        threading.Event().wait(0.01)
    trackers.close("finished", {})
    assert len({each.trace_id for each in collector.spans}) == 2
    failure, recovery = told
    assert failure.startswith("tracker otlp failed (ConnectionError: ")
    assert recovery == "tracker otlp works again"


@pytest.mark.parametrize(("scheme", "variables"), [("basic", "[KEY]"), ("bearer", "[KEY, OTHER]")])
def test_a_scheme_has_its_number_of_variables(scheme, variables):
    credentials = f"{{header: Authorization, scheme: {scheme}, variables: {variables}}}"
    with pytest.raises(ConfigError, match=rf"^tracker\.otlp\.credentials: scheme={scheme} with"):
        compose(["conf=smoke", "tracker=otlp", f"tracker.otlp.credentials={credentials}"])


def test_presets_take_credentials_from_the_environment_alone(tmp_path, collector, monkeypatch):
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk-public")
    monkeypatch.delenv("LANGFUSE_SECRET_KEY", raising=False)
    settings = ["tracker=langfuse", f"tracker.langfuse.endpoint={collector.url}"]
    config = compose(["conf=smoke", *settings]).config
    with pytest.raises(ConfigError, match=r"tracker\.langfuse: .*LANGFUSE_SECRET_KEY is not set"):
        check_tracker("langfuse", config.tracker["langfuse"])
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk-very-secret")
    check_tracker("langfuse", config.tracker["langfuse"])
    trackers, folder = tracking(tmp_path, *settings)
    trackers.log({"step": 1, "stage": "grpo"}, [group_of(played())])
    trackers.close("finished", {})
    (headers,) = collector.headers
    pair = base64.b64encode(b"pk-public:sk-very-secret").decode()
    headers = {name.lower(): value for name, value in headers.items()}
    assert headers["authorization"] == f"Basic {pair}"
    assert headers["x-langfuse-ingestion-version"] == "4"
    written = b"".join(path.read_bytes() for path in folder.path.rglob("*") if path.is_file())
    assert b"sk-very-secret" not in written
    assert pair.encode() not in written


@pytest.mark.parametrize("preset", ["otlp", "phoenix", "mlflow_traces", "weave", "langfuse"])
def test_every_preset_is_valid(preset):
    needed = ["tracker.weave.headers.project_id=me/words"] if preset == "weave" else []
    config = compose(["conf=smoke", f"tracker={preset}", *needed]).config
    assert [*config.tracker] == [preset]


async def test_played_episodes_have_times_in_order():
    origin = Origin(run="r", environment="e", provider="p", model="m", step=1, now_s=0.0)
    for episode in all_episodes(await collect(tiny_policy(), num_tasks=1, group_size=2)):
        root, *others = episode_spans(origin, "0", episode)
        times = [time for span in others for time in (span.start_ns, span.end_ns)]
        assert times == sorted(times)
        assert root.start_ns <= times[0]
        assert times[-1] <= root.end_ns + 1_000_000_000  # clocks of two kinds
        assert root.start_ns > 1e18


def test_an_episode_without_times_has_spans_of_no_length():
    origin = Origin(run="r", environment="e", provider="p", model="m", step=1, now_s=50.0)
    episode = run_samples.episode(Random(0), 0, 0, True)
    spans = episode_spans(origin, "0", episode)
    assert {(span.start_ns, span.end_ns) for span in spans} == {(50 * 10**9, 50 * 10**9)}
    episode.status, episode.error = Status.ERROR, "it broke"
    root = episode_spans(origin, "0", episode)[0]
    assert root.error == "it broke"
    assert root.events == []


def test_an_episode_is_traced_with_the_name_of_its_own_environment():
    origin = Origin(run="r", environment="first", provider="p", model="m", step=1, now_s=0.0)
    episode = run_samples.episode(Random(0), 0, 0, True)
    episode.task = replace(episode.task, env="second")
    root = episode_spans(origin, "0", episode)[0]
    assert root.name == "invoke_agent second"
    assert root.attributes["gen_ai.agent.name"] == "second"


def test_rewards_are_scores_of_their_trace_at_langfuse(tmp_path, collector, monkeypatch):
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk")
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk")
    url = collector.url.replace("/v1/traces", "/api/public/otel/v1/traces")
    failed = played()
    failed.status = Status.ERROR
    settings = ("tracker=langfuse", f"tracker.langfuse.endpoint={url}")
    send_to(tmp_path, [group_of(played(), failed)], *settings)
    assert collector.paths == ["/api/public/otel/v1/traces", "/api/public/ingestion"]
    sent = [{name.lower(): each[name] for name in each} for each in collector.headers]
    assert [each["authorization"] for each in sent] == ["Basic cGs6c2s="] * 2
    ((*scores,),) = collector.batches
    assert {each["type"] for each in scores} == {"score-create"}
    bodies = {each["body"]["name"]: each["body"] for each in scores}
    values = {name: body["value"] for name, body in bodies.items()}
    assert values == {"reward": 0.75, "success": 0.0, "env": 0.25, "ruler": 0.5}
    assert bodies["ruler"]["comment"] == "it came closer"
    traces = {span.trace_id.hex() for span in collector.spans if not span.parent_span_id}
    assert {each["body"]["traceId"] for each in scores} < traces, "the failed one has no score"
    assert len({body["id"] for body in bodies.values()}) == len(bodies)


def test_scores_that_langfuse_rejects_are_told(tmp_path, collector, monkeypatch):
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk")
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk")
    monkeypatch.setattr(delivery, "FIRST_DELAY_S", 0.01)
    collector.rejected = [{"status": 400, "message": "no such project"}]
    url = collector.url.replace("/v1/traces", "/api/public/otel/v1/traces")
    told = []
    settings = ("tracker=langfuse", f"tracker.langfuse.endpoint={url}")
    send_to(tmp_path, [group_of(played())], *settings, notify=told.append)
    assert any("no such project" in each for each in told)
