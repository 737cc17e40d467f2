"""What a vLLM server tells: its metrics, and its log while it starts."""

from openenv_pipe.engines.vllm.server_metrics import ServerMetrics, read_metrics
from openenv_pipe.engines.vllm.start_progress import StartProgress

PAGE = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{{engine="0",model_name="base"}} {running}
vllm:generation_tokens_total{{engine="0",model_name="base"}} {tokens}
vllm:prefix_cache_queries_total{{engine="0",model_name="base"}} {queries}
vllm:prefix_cache_hits_total{{engine="0",model_name="base"}} {hits}
"""


async def test_metrics_are_the_highest_and_the_growth_since_the_last_step():
    pages = []

    async def read() -> str | None:
        return pages.pop(0)

    metrics = ServerMetrics(read)
    pages += [PAGE.format(running=3, tokens=1e2, queries=50, hits=10)]
    first = await metrics.summary()
    assert (first["engine/running_max"], first["engine/generated_tokens"]) == (3, 100)
    pages += [PAGE.format(running=5, tokens=120, queries=90, hits=40)]
    await metrics._look()
    pages += [PAGE.format(running=1, tokens=150, queries=150, hits=60)]
    second = await metrics.summary()
    assert (second["engine/running_max"], second["engine/generated_tokens"]) == (5, 50)
    assert second["engine/prefix_hit_share"] == 0.5
    pages += [PAGE.format(running=0, tokens=30, queries=1, hits=0)]  # a new server counts from 0
    assert (await metrics.summary())["engine/generated_tokens"] == 30
    pages += [None]  # while there is none, nothing changes
    assert (await metrics.summary())["engine/generated_tokens"] == 0


def test_the_metrics_of_several_engines_are_added():
    page = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 3.0\n'
    assert read_metrics(page) == {"num_requests_running": 5.0}


def test_a_start_tells_each_phase_once(tmp_path):
    log, told = tmp_path / "engine.log", []
    log.write_text("Starting to load model of the server before\n")
    progress = StartProgress(log, told.append)
    with log.open("a") as file:
        file.write("INFO Resolved architecture: Qwen3ForCausalLM\nINFO Starting to lo")
        file.flush()
        progress.look()
        file.write("ad model x\nINFO Starting to load model y\n")
        file.flush()
        progress.look()
    progress.look()
    assert [text.split(" (")[0] for text in told] == [
        "engine: architecture Qwen3ForCausalLM",
        "engine: loading weights",
    ]
