"""What we read from a vLLM server: its metrics, and its log while it starts."""

from openenv_pipe.engines.vllm.server_metrics import (
    Measured,
    ServerMetrics,
    read_metrics,
    summarise,
)

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
    first = summarise([await metrics.measured()])
    assert (first["engine/running_max"], first["engine/generated_tokens"]) == (3, 100)
    pages += [PAGE.format(running=5, tokens=120, queries=90, hits=40)]
    await metrics._look()
    pages += [PAGE.format(running=1, tokens=150, queries=150, hits=60)]
    second = summarise([await metrics.measured()])
    assert (second["engine/running_max"], second["engine/generated_tokens"]) == (5, 50)
    assert second["engine/prefix_hit_share"] == 0.5
    # a restarted server counts from 0
    pages += [PAGE.format(running=0, tokens=30, queries=1, hits=0)]
    assert (await metrics.measured()).grown["generation_tokens_total"] == 30
    pages += [None]  # no server answers, so nothing changes
    assert (await metrics.measured()).grown["generation_tokens_total"] == 0


async def test_what_a_server_has_counted_before_the_run_is_not_the_runs():
    """A sweep's worker keeps servers for its next job, and an attached server has other users."""
    pages = [PAGE.format(running=7, tokens=100, queries=50, hits=10)]

    async def read() -> str | None:
        return pages.pop(0)

    metrics = ServerMetrics(read)
    await metrics.open()
    pages += [PAGE.format(running=2, tokens=130, queries=60, hits=15)]
    first = summarise([await metrics.measured()])
    await metrics.close()
    assert (first["engine/running_max"], first["engine/generated_tokens"]) == (2, 30)
    assert first["engine/prefix_hit_share"] == 0.5


def test_of_several_servers_the_sums_are_told_and_each_under_its_number():
    counted = {"generation_tokens_total": 100.0, "prefix_cache_queries_total": 300.0}
    busy = Measured(
        highest={"engine/running_max": 9.0},
        grown={**counted, "prefix_cache_hits_total": 30.0},
    )
    idle = Measured(
        highest={"engine/running_max": 2.0},
        grown={"prefix_cache_queries_total": 100.0, "prefix_cache_hits_total": 70.0},
    )
    summary = summarise([busy, idle])
    assert summary["engine/running_max"] == summary["engine/0/running_max"] == 9
    assert summary["engine/1/running_max"] == 2
    assert summary["engine/generated_tokens"] == 100
    # the share over all queries, not the mean of 0.1 and 0.7
    assert summary["engine/prefix_hit_share"] == 0.25
    assert summary["engine/1/prefix_hit_share"] == 0.7
    gone = Measured(highest={}, grown={})
    assert summarise([gone]) == {}
    assert summarise([busy, gone])["engine/generated_tokens"] == 100
    assert not any(name.startswith("engine/0/") for name in summarise([busy]))


def test_the_metrics_of_several_engines_are_added():
    page = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 3.0\n'
    assert read_metrics(page) == {"num_requests_running": 5.0}
