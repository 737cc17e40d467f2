"""The viewer in a real Chromium: what a person sees and clicks, live and from a bundle's files."""

import asyncio
import json
import re
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.commands import SMALL, Command, wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import run_samples

from openenv_pipe.algorithms.advantages import step_advantages
from openenv_pipe.environments.images import with_references
from openenv_pipe.runs.episodes import episodes_path, write_episodes

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

PATIENCE_MS = 60_000  # no load reaches it
HOSTILE = '<img src="x" onerror="document.title=`owned`"><script>document.title="owned"</script>'
HOSTILE_JSON = json.dumps(HOSTILE)
MESSAGES = [
    {"role": "tools", "content": json.dumps([{"name": "look", "description": HOSTILE}])},
    {"role": "system", "content": "Look first.\nThen guess."},
    {"role": "user", "content": HOSTILE},
    {"role": "assistant", "content": "I look.", "calls": ['{"name": "look", "arguments": {}}']},
    {"role": "tool", "name": "look", "content": "nothing \u202e here"},
]
FRAME = [[[250, column, row] for column in range(40)] for row in range(32)]
ENDLESS = ("trainer.steps=5000", "trainer.tasks_per_step=2", "trainer.group_size=2")
QUICK = ("eval.num_tasks=1", "eval.baselines=false", "trainer.checkpoint.every=5000")


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium, or a skip where it is not installed."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("this machine has no chromium")
    expect.set_options(timeout=PATIENCE_MS)
    with playwright.sync_playwright() as driver:
        # Chromium's own sandbox does not start as root; the pages are those of this repository.
        chromium = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with the finished run smoke/0001, which has a skipped group and hostile texts, and
    with the sweep 2026 of three runs."""
    home = tmp_path_factory.mktemp("viewer")
    folder = run_samples.create(home / "runs")
    run_samples.train(folder, num_steps=3)
    groups = run_samples.groups(num_groups=2, size=3, seed=5)
    for each in groups[0].episodes:
        each.reward, each.turn_rewards = 0.5, []
    for each in groups[1].episodes:
        each.reward, each.turn_rewards = float(each.member), []
        each.turns[0].reply, each.first_observation = HOSTILE, {"page": HOSTILE}
        each.turns[0].messages = MESSAGES
    seen = groups[0].episodes[0].first_observation
    with ThreadPoolExecutor() as threads:  # this one has playwright's event loop
        shown = threads.submit(asyncio.run, with_references({**seen, "frame": FRAME})).result()
    groups[0].episodes[0].first_observation = shown
    advantages = step_advantages(groups, baseline="group", scale="none", discount=1.0)
    write_episodes(episodes_path(folder.path, 4), groups, advantages)
    run_samples.evaluate(folder, "start", 0.2)
    run_samples.evaluate(folder, "trained", 0.6, step=3)
    folder.finish("finished")
    run_samples.sweep(home / "runs", {0.001: 0.2, 0.01: 0.8, 0.1: 0.5})
    return home


@contextmanager
def viewer(home: Path, *options: str):
    """The link of a viewer, which ends with the block."""
    server = Command(home, "view", *options)
    try:
        found = wait_until(lambda: re.search(r"http://\S+", server.out + server.err), "it", server)
        yield found[0]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
    assert "Traceback" not in server.err, "pages that are open do not keep the server from ending"


@pytest.fixture(scope="module")
def address(home):
    """The link of a viewer of these runs."""
    with viewer(home) as link:
        yield link


@pytest.fixture(scope="module")
def bundle(home):
    """The address of the index page of a bundle of these runs."""
    written = Command(home, "view", "runs/smoke/0001", "--bundle", "bundle")
    assert written.wait() == 0, written.err
    return (home / "bundle" / "index.html").as_uri()


@pytest.fixture
def page(browser):
    """A page that must not report an error."""
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    yield page
    page.close()
    assert problems == []


def test_the_token_leaves_the_address_and_hides_in_a_cookie(address, browser):
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(address.partition("?")[0])
        expect(page.get_by_role("heading", name="Token needed")).to_be_visible()
        page.goto(f"{address}#/run/smoke/0001/logs")
        expect(page.locator("main")).to_have_attribute("data-path", "/run/smoke/0001/logs")
        assert page.url == f"{address.partition('?')[0]}#/run/smoke/0001/logs"
        (cookie,) = context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/")
        assert cookie["name"].endswith(f"_{urlsplit(address).port}")
        assert page.evaluate("document.cookie") == ""


def test_two_viewers_in_one_browser(home, address, browser):
    with browser.new_context() as context, viewer(home) as other:
        pages = [context.new_page() for _ in range(2)]
        for page, link in zip(pages, (address, other), strict=True):
            page.goto(f"{link}#/run/smoke/0001/logs")
        for page in pages:
            page.reload()
            expect(page.locator("main")).to_have_attribute("data-path", "/run/smoke/0001/logs")


def test_a_link_of_another_site_opens_the_viewer(address, browser):
    """Browsers send no strict cookie to what another site has opened, also behind a redirect."""
    where = "#/run/smoke/0001/logs"
    plain = address.partition("?")[0]
    with browser.new_context() as context:
        page = context.new_page()
        for link in (f"{address}{where}", f"{plain}{where}"):
            page.route("http://other.example/", lambda route, _, link=link: _link_to(route, link))
            page.goto("http://other.example/")
            page.get_by_role("link").click()
            expect(page.locator("main")).to_have_attribute("data-path", "/run/smoke/0001/logs")
            assert page.url == f"{plain}{where}"
    with browser.new_context() as context:
        page = context.new_page()
        page.route("http://other.example/", lambda route: _link_to(route, plain + where))
        page.goto("http://other.example/")
        page.get_by_role("link").click()
        expect(page.get_by_role("heading", name="Token needed")).to_be_visible()


def _link_to(route, link: str) -> None:
    route.fulfill(content_type="text/html", body=f'<a href="{link}">runs</a>')


def test_an_open_page_says_that_a_restarted_viewer_has_another_token(home, browser):
    with browser.new_context() as context:
        page = context.new_page()
        with viewer(home) as link:
            page.goto(f"{link}#/run/smoke/0001")
            page.locator("canvas").first.wait_for()
        with viewer(home, "--port", str(urlsplit(link).port)) as link:
            expect(page.get_by_role("heading", name="Token needed")).to_be_visible()
            page.goto(f"{link}#/run/smoke/0001")
            page.locator("canvas").first.wait_for()


def test_a_running_training_is_shown_as_it_goes_on(home, address, page):
    training = Command(home, "train", "conf=echo", *ENDLESS, *QUICK, *SMALL)
    try:
        metrics = home / "runs/echo/0001/metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text(), "a step", training)
        page.goto(f"{address}#/run/echo/0001")
        step = page.locator(".progress")
        page.locator("canvas").first.wait_for()
        expect(step).not_to_have_text(step.text_content())
        expect(page.locator(".status.running")).to_have_count(1)
        training.send_signal(signal.SIGINT)
        page.locator(".status.interrupted").wait_for()
    finally:
        training.send_signal(signal.SIGINT)
        training.wait()
    page.goto(f"{address}#/runs")
    page.locator("tr", has_text="smoke/0001").locator(".status.finished").wait_for()
    page.get_by_label("Filter").fill("interrupted")
    expect(page.locator("tbody tr")).to_have_count(1)


@pytest.mark.parametrize("place", ["address", "bundle"])
def test_a_bar_keeps_its_episodes(place, page, request):
    page.goto(f"{request.getfixturevalue(place)}#/run/smoke/0001/episodes")
    bars, rows = page.locator(".histogram button"), page.locator("tbody tr")
    expect(rows).to_have_count(24)
    size = int(bars.last.get_attribute("title").split()[-2])
    bars.last.click()
    expect(rows).to_have_count(size)
    assert "reward_from=" in page.url, "the address keeps the choice"
    page.reload()
    expect(rows).to_have_count(size)
    page.locator(".histogram button.on").click()
    expect(rows).to_have_count(24)


def test_what_the_reward_says_already_is_not_shown_again(address, page):
    found = """async (terms) => {
      const { termsOf } = await import('/static/run_page.js');
      return termsOf(1, terms).length;
    }"""
    page.goto(f"{address}#/run/smoke/0001")
    page.locator("canvas").first.wait_for()
    found = [page.evaluate(found, terms) for terms in ({"env": 1}, {"env": 2}, {"a": 1, "b": 0})]
    assert found == [0, 1, 2]


@pytest.mark.parametrize("place", ["address", "bundle"])
def test_tokens_are_coloured_and_have_their_numbers(place, page, request):
    where = "#/run/smoke/0001/episode?step=4&line=6"
    page.goto(f"{request.getfixturevalue(place)}{where}")
    page.get_by_role("link", name="Tokens", exact=True).click()
    tokens = page.locator("[data-token]")
    tokens.first.wait_for()
    assert tokens.count() == 3 * 12
    page.get_by_label("Colour by").select_option("advantage")
    expect(page).to_have_url(re.compile("colour=advantage"))
    heats = [
        tokens.nth(at).evaluate("each => each.style.getPropertyValue('--heat')") for at in (0, 6)
    ]
    assert heats == ["0", "1.000"], "the environment's tokens have no advantage"
    tokens.nth(6).hover()
    tip = page.locator(".tip")
    tip.wait_for()
    assert "advantage1" in tip.text_content()
    assert "loss mask1, of the model" in tip.text_content()


@pytest.mark.parametrize("place", ["address", "bundle"])
def test_the_messages_with_their_roles(place, home, page, request):
    page.goto(f"{request.getfixturevalue(place)}#/run/smoke/0001/episode?step=4&line=5")
    page.get_by_role("link", name="Messages", exact=True).click()
    expect(page.locator("article.turn")).to_have_count(3)
    said = page.locator("article.turn").first.locator(".said")
    shown = [tuple(each.locator("h3, .text").all_text_contents()) for each in said.all()]
    printed = Command(home, "episodes", "runs/smoke/0001", "--step", "4", "--full", "--limit", "9")
    assert printed.wait() == 0, printed.err
    for role, text in shown:
        assert f"[{'1 model' if role == 'Reply' else role}] {text}" in printed.out
    assert [role for role, _ in shown] == ["tools", "system", "user", "assistant", "tool", "Reply"]
    assert not said.first.locator(".text").is_visible()
    said.first.locator("summary").click()
    expect(said.first.locator(".text")).to_contain_text(HOSTILE_JSON)
    page.keyboard.press("m")
    expect(page.get_by_role("heading", name="Beginning")).to_be_visible()
    page.keyboard.press("m")
    expect(said.nth(3)).to_contain_text('<tool_call>\n{"name": "look"')


def test_words_that_differ_are_marked(address, page):
    page.goto(f"{address}#/same?runs=smoke/0001,smoke/0001&task=eval/1")
    last = page.locator(".member").last
    expect(last.locator(".said.model .changed").first).to_have_text(HOSTILE)
    long = " ".join(str(number) for number in range(2000))
    pairs = [
        ("7 + 5 is 12, so 12.", "7 + 5 is 13, so 12."),
        ("the red and old house", "the big and blue house"),
        ("first second third", "first third"),
        ("first third", "first second third"),
        ("the end", "the end, and more"),
        ("same", "same"),
        (f"a {long} z", f"a {long[::-1]} z"),
    ]
    found = page.evaluate(
        """async (pairs) => {
          const { difference } = await import('/static/conversation.js');
          return pairs.map(([text, other]) => difference(text, other));
        }""",
        pairs,
    )
    assert ["".join(piece for piece, _ in each) for each in found] == [text for text, _ in pairs]
    assert found[:-1] == [
        [["7 + 5 is ", False], ["12", True], [", so 12.", False]],
        [["the ", False], ["red", True], [" and ", False], ["old", True], [" house", False]],
        [["first ", False], ["second ", True], ["third", False]],
        [["first ", False], ["", True], ["third", False]],
        [["the end", False], ["", True]],
        [["same", False]],
    ]
    assert [differs for _, differs in found[-1]] == [False, True, False]


def test_a_group_side_by_side(bundle, page):
    page.goto(f"{bundle}#/run/smoke/0001/group?step=4&group=1/0")
    page.get_by_text("all its episodes have the reward 0.5").wait_for()
    assert page.locator(".member").count() == 3
    beginnings = page.get_by_role("heading", name="Beginning")
    expect(beginnings).to_have_count(3)  # One of them has an image.
    page.goto(f"{bundle}#/run/smoke/0001/group?step=4&group=1/1")
    expect(beginnings).to_have_count(1)
    page.get_by_text("Advantages from -1").wait_for()


def test_the_bundle_of_a_run_opens_the_run(bundle, page):
    page.goto(bundle)
    expect(page.get_by_role("heading", name="smoke/0001")).to_be_visible()
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.locator("tbody tr")).to_have_count(1)


def test_a_note_on_an_episode_and_a_view_with_a_name(home, address, page):
    page.goto(f"{address}#/run/smoke/0001/episode?step=1&line=2")
    page.locator("summary", has_text="Note").click()
    page.get_by_label("Note").fill(HOSTILE)
    page.get_by_role("button", name="Save the note").click()
    page.get_by_text("Saved.").wait_for()
    page.reload()
    expect(page.get_by_label("Note")).to_have_value(HOSTILE)
    page.goto(f"{address}#/run/smoke/0001/episodes?first_step=1&last_step=1")
    note = page.get_by_text("note", exact=True)
    expect(note).to_have_attribute("title", HOSTILE)
    page.keyboard.press("v")
    page.get_by_label("Name of this page").fill("first step")
    page.get_by_role("button", name="Save", exact=True).click()
    link = page.locator("dialog a")
    expect(link).to_have_text("first step")
    page.get_by_role("button", name="Close").click()
    page.goto(f"{address}#/runs")
    page.keyboard.press("v")
    link.click()
    expect(page).to_have_url(re.compile("last_step=1"))
    expect(note).to_have_count(1)
    page.keyboard.press("v")
    page.get_by_role("button", name="Delete").click()
    expect(link).to_have_count(0)


def test_keys_go_through_the_episodes_of_a_group(address, page):
    page.goto(f"{address}#/run/smoke/0001/episode?step=1&line=1")
    chosen = page.locator(".chip[aria-current]")
    expect(chosen).to_have_attribute("title", re.compile("episode 0"))
    page.keyboard.press("j")
    expect(chosen).to_have_attribute("title", re.compile("episode 1"))
    page.keyboard.press("t")
    page.locator("[data-token]").first.wait_for()
    page.keyboard.press("k")
    expect(chosen).to_have_attribute("title", re.compile("episode 0"))
    expect(page).to_have_url(re.compile("line=1.*view=tokens"))
    page.keyboard.press("e")
    expect(page.locator("tbody tr")).to_have_count(24)
    page.keyboard.press("/")
    page.keyboard.type("guess")
    expect(page.get_by_label("Search text")).to_have_value("guess")


def test_dragging_along_an_axis_keeps_the_settings_that_cross_it_there(address, page):
    page.goto(f"{address}#/sweep/2026")
    lines = page.locator(".parallel .setting")
    expect(lines).to_have_count(3)
    assert page.locator(".parallel .name").first.text_content() == "optimizer.lr (log)"
    success = page.locator(".parallel [data-axis='1']")
    success.scroll_into_view_if_needed()
    box = success.bounding_box()
    across = box["x"] + box["width"] / 2
    page.mouse.move(across, box["y"] + 1)
    page.mouse.down()
    page.mouse.move(across, box["y"] + box["height"] / 4)
    page.mouse.up()
    kept = page.locator(".parallel .setting:not(.faded)")
    expect(kept).to_have_attribute("data-setting", "optimizer.lr=0.01")
    page.get_by_text("1 of 3 settings: optimizer.lr=0.01").wait_for()
    page.mouse.click(across, box["y"] + box["height"] / 2)
    expect(kept).to_have_count(3)


def test_a_person_and_the_model_play(address, page):
    page.goto(f"{address}#/run/smoke/0001/play?checkpoint=start&index=3")
    page.get_by_role("button", name="Start").click()
    reply = page.get_by_label("Your reply")
    reply.wait_for()
    page.get_by_text("Scripted policy: random").wait_for()
    page.get_by_role("button", name="Use it").first.click()
    expect(reply).not_to_have_value("")
    taken = reply.input_value()
    late = []  # the answer to the page, which arrives after what the session did next
    page.route("**/api/play/reply", lambda route: late.append((route, route.fetch())))
    page.get_by_role("button", name="Me, with this text").click()
    turns = page.locator("article.turn", has_text="Reply by")
    expect(turns).to_have_count(1)
    [(route, answer)] = late
    with page.expect_response("**/api/play/reply") as arrived:
        route.fulfill(response=answer)
    arrived.value.finished()
    page.unroute("**/api/play/reply")
    page.evaluate("new Promise((done) => setTimeout(done))")  # The page has dealt with it.
    expect(turns.first).to_contain_text("Reply by you")
    expect(turns.first.locator(".said.model .text")).to_have_text(taken)
    page.get_by_role("button", name="The model").click()
    expect(turns).to_have_count(2)
    expect(turns.last).to_contain_text("Reply by the model")
    page.goto(f"{address}#/run/smoke/0001/play")  # An address is enough to come back to it.
    expect(turns).to_have_count(2)
    page.get_by_role("button", name="End", exact=True).click()
    page.get_by_role("button", name="Start").wait_for()


def test_a_checkpoint_scores_the_tokens_of_an_episode(address, page):
    page.goto(f"{address}#/run/smoke/0001/episode?step=4&line=6&view=tokens")
    page.get_by_role("button", name="Show alternatives and KL").click()
    page.get_by_text("By the untrained weights, at temperature 1 and without top_p").wait_for()
    expect(page.get_by_label("Colour by")).to_have_value("kl")
    page.locator("[data-token]").nth(6).hover()
    tip = page.locator(".tip")
    expect(tip).to_contain_text("logprob, scored")
    expect(tip).to_contain_text("KL from the start0")
    expect(tip).to_contain_text("5. ")


def test_curves_that_do_not_change_are_folded_away(address, page):
    page.goto(f"{address}#/run/smoke/0001")
    constant = page.locator(".section details:not([hidden])").first
    constant.locator("summary").wait_for()
    assert not constant.locator("canvas").first.is_visible()
    constant.locator("summary").click()
    assert constant.locator("canvas").first.is_visible()
    shown = "ticks => import('/static/charts.js').then(({ tickTexts }) => tickTexts(ticks))"
    assert page.evaluate(shown, [12000, 12500, 13000]) == ["1.2e4", "1.25e4", "1.3e4"]
    assert page.evaluate(shown, [0.99995, 1, 1.00005]) == ["0.99995", "1", "1.00005"]


def test_every_evaluation_of_a_step_is_inside_the_plot(address, page):
    page.goto(f"{address}#/run/smoke/0001")
    points = [{"x": 1, "mean": -1, "low": -1.5, "high": 0}, {"x": 1, "mean": 2, "low": 1}]
    low, high = page.evaluate(
        """async (points) => {
          const chart = new (await import('/static/charts.js')).Chart('reward');
          document.body.append(chart.node);
          chart.update([{ name: 'reward', x: [0, 1], y: [0, 0.5] }], { points });
          await new Promise((done) => setTimeout(done));
          return [chart.plot.scales.y.min, chart.plot.scales.y.max];
        }""",
        points,
    )
    assert low <= -1.5 and high >= 2


def test_metrics_over_another_metric(address, page):
    page.goto(f"{address}#/run/smoke/0001")
    page.get_by_label("Over").select_option("reward/mean")
    expect(page).to_have_url(re.compile("over=reward%2Fmean"))
    panel = page.locator(".panel", has=page.get_by_role("heading", name="Success", exact=True))
    over = panel.locator(".u-over")
    over.hover()
    expect(panel.locator(".legend .at").first).to_have_text(re.compile(r"reward/mean \S+, step \d"))
    expect(page.get_by_role("heading", name="Reward", exact=True)).to_have_count(1)  # the section's


def test_shares_have_digits_near_0_and_1_and_numbers_in_texts_are_sorted_as_numbers(address, page):
    page.goto(address)
    shares, tasks = page.evaluate(
        """async () => {
          const { percent, compared } = await import('/static/dom.js');
          const shares = [0, 1, 0.5, -0.03, 0.095, 0.996, 0.9999, -0.004, 0.0004, 1 - 1e-12];
          return [shares.map(percent), ['train/10', 'train/2', 'train/1'].sort(compared)];
        }"""
    )
    assert shares == [
        *("0 %", "100 %", "50 %", "-3 %", "9.5 %"),
        *("99.6 %", "99.99 %", "-0.4 %", "0.04 %", "100 %"),
    ]
    assert tasks == ["train/1", "train/2", "train/10"]


def test_steps_with_an_equal_value_are_two_dots(address, page):
    page.goto(f"{address}#/run/smoke/0001")
    dots = page.evaluate(
        """async () => {
          const chart = new (await import('/static/charts.js')).Chart('b', { over: 'a' });
          document.body.append(chart.node);
          chart.update([{ name: 'b', x: [2, 1, 2], y: [0.5, 0.25, 0.75], steps: [1, 2, 3] }]);
          await new Promise((done) => setTimeout(done));
          const { plot, steps } = chart, found = [];
          chart.dots(plot, (place) => found.push([steps[place], plot.data[1][place]]));
          return found;
        }"""
    )
    assert dots == [[2, 0.25], [1, 0.5], [3, 0.75]]


def test_a_task_over_the_steps_and_in_two_evaluations(bundle, page):
    tasks = f"{bundle}#/run/smoke/0001/tasks"
    page.goto(tasks)
    expect(page.locator(".heat").first).to_have_attribute("title", re.compile("step 1: "))
    expect(page.locator(".heat")).to_have_count(page.locator("tbody tr").count())
    page.goto(f"{tasks}?source=eval/trained")
    expect(page.locator(".heat")).to_have_count(0)
    page.locator("tbody a").first.click()
    page.get_by_label("Beside").select_option("evaluation start")
    expect(page.locator(".member")).to_have_count(2)
    chosen = page.get_by_label("Episode").locator("option:checked")
    expect(chosen.first).to_have_text(re.compile("evaluation trained"))
    expect(chosen.last).to_have_text(re.compile("evaluation start"))


@pytest.mark.parametrize("is_bundle", [False, True])
def test_a_group_and_a_task_with_more_episodes_than_one_answer_has(page, tmp_path, is_bundle):
    folder = run_samples.create(tmp_path / "runs")
    write_episodes(episodes_path(folder.path, 1), run_samples.groups(num_groups=1, size=450))
    folder.finish("finished")
    with ExitStack() as stack:
        if is_bundle:
            written = Command(tmp_path, "view", "runs/smoke/0001", "--bundle", "bundle")
            assert written.wait() == 0, written.err
            link = (tmp_path / "bundle" / "index.html").as_uri()
        else:
            link = stack.enter_context(viewer(tmp_path))
        page.goto(f"{link}#/run/smoke/0001/task?task=eval/0")
        expect(page.locator("tbody tr")).to_have_count(450)
        shown = "200 of the 450 episodes of the group are shown."
        page.goto(f"{link}#/run/smoke/0001/group?step=1&group=1/0")
        expect(page.get_by_text(shown)).to_be_visible()
        expect(page.locator(".member")).to_have_count(200)
        page.goto(f"{link}#/run/smoke/0001/episode?step=1&line=300")
        expect(page.locator(".chip")).to_have_count(200)
        expect(page.get_by_text(shown)).to_be_visible()
        numbers = [int(text.split()[0]) for text in page.locator(".chip").all_inner_texts()]
        assert numbers == [*range(199, 399)], "episodes around the one that is shown"


@pytest.mark.parametrize("place", ["address", "bundle"])
def test_images_of_observations_are_shown(place, page, request):
    page.goto(f"{request.getfixturevalue(place)}#/run/smoke/0001/episode?step=4&line=1")
    image = page.get_by_alt_text("[image: 40 x 32 pixels]")
    expect(image).to_have_count(1)
    expect(image).to_have_js_property("naturalWidth", 40)  # It is loaded, not only named.


@pytest.mark.parametrize("place", ["address", "bundle"])
def test_hostile_text_stays_text(place, page, request):
    page.goto(f"{request.getfixturevalue(place)}#/run/smoke/0001/episode?step=4&line=4")
    replies = page.locator(".said.model .text")
    replies.first.wait_for()
    assert replies.first.text_content() == HOSTILE
    assert page.locator("main img, main script").count() == 0
    assert "owned" not in page.title()


def on_a_phone(place, scheme, browser, begin):
    """Yield every page on a narrow screen, with its address."""
    run = "#/run/smoke/0001"
    pages = ["#/runs", "#/sweeps", *(["#/sweep/2026"] if place == "address" else [])]
    pages += [f"{run}{tab}" for tab in ("", "/episodes", "/tasks", "/evaluations")]
    pages += [f"{run}?over=reward/mean", f"{run}/logs", f"{run}/config"]
    pages += [f"{run}/episode?step=1&line=1"]
    pages += [f"{run}/play"] if place == "address" else []
    pages += [f"{run}/group?step=1&group=1/0", f"{run}/task?task=eval/0"]
    pages += [f"{run}/episode?step=1&line=1&view=tokens"]
    pages += [f"{run}/episode?step=4&line=4&view=messages"]
    pages += ["#/same?runs=smoke/0001,smoke/0001&task=eval/1"]
    page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    page.set_default_timeout(PATIENCE_MS)
    try:
        for where in pages:
            page.goto(begin + where)
            path = where.removeprefix("#").partition("?")[0]
            page.locator(f'main[data-path="{path}"]').wait_for()
            assert page.locator("main > .notice.bad").count() == 0, where
            yield page, where
    finally:
        page.close()


@pytest.mark.parametrize(("place", "scheme"), [("address", "light"), ("bundle", "dark")])
def test_every_page_fits_a_phone(place, scheme, browser, request):
    for page, where in on_a_phone(place, scheme, browser, request.getfixturevalue(place)):
        wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wider <= 0, f"{where} is wider than the screen by {wider}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_has_no_serious_finding_on_any_page(scheme, browser, address):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    for page, where in on_a_phone("address", scheme, browser, address):
        for found in axe.run(page).response["violations"]:
            assert found["impact"] in ("minor", "moderate"), (where, found["id"], found["nodes"])
