"""Templates of adapters: what they make is bounded in memory, and else they are Jinja's own."""

import jinja2
import pytest

from openenv_pipe.environments.adapters.bounded_templates import BoundedEnvironment, render
from openenv_pipe.environments.adapters.templates import compile_template, render_message
from openenv_pipe.errors import ConfigError

NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
LOOP = "{% set ns = namespace(v=START) %}{% for i in range(21) %}{% set ns.v = BODY %}{% endfor %}"
FIELDS = {
    "length": 99,
    "long": "x\n" * 5_000,
    "words": ["a", "b c", 7, None],
    "nested": {"a": [1, {"b": "ü"}]},
    "text": "a\tb, {0} %s and 12:30 {",
}


def loop(start: str, body: str) -> str:
    """Return a template that changes a value 21 times, and shows how long it is then."""
    return LOOP.replace("START", start).replace("BODY", body) + "{{ ns.v | length }}"


def told(template: str) -> str:
    return render_message("user", compile_template("first", template), FIELDS)["content"]


def length(expression: str) -> str:
    return f"{{{{ ({expression}) | length }}}}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 9**(9**9) }}",
        "{{ length**length**length**length }}",
        "{{ (2**9999) * (2**9999) }}",
        "{{ 'x' * 10**9 }}",
        "{{ 999999999 * ['x'] }}",
        "{{ range(10**9) | list }}",
        NESTED.replace("BODY", ""),
        "{% for a in range(9999) %}{{ long }}{% endfor %}",
        loop("long", "ns.v ~ ns.v"),
        loop("long", "ns.v + ns.v"),
        loop("[1, 2, 3, 4, 5, 6, 7, 8]", "ns.v + ns.v"),
        loop("long", "[ns.v, ns.v] | join"),
        loop("long", "''.join([ns.v, ns.v])"),
        loop("long", "'%s%s' % (ns.v, ns.v)"),
        loop("long", "'%s%s' | format(ns.v, ns.v)"),
        loop("long", "'{0}{0}'.format(ns.v)"),
        loop("long", "ns.v | replace('x', 'xx')"),
        loop("long", "ns.v.replace('x', 'xx')"),
        loop("[1]", "[ns.v, ns.v, ns.v]") + "{{ ns.v }}",
        "{% set ns = namespace(v=[]) %}{% for i in range(9999) %}"
        "{% set ns.v = [ns.v, long ~ i] %}{% endfor %}",
        "{% set ns = namespace(v=[]) %}{% for i in range(9999) %}"
        "{% set ns.v = [ns.v, long[1:]] %}{% endfor %}",
        "{% set ns = namespace(v='x') %}{% for i in range(21) %}"
        "{% set t %}{{ ns.v * 9 }}{% endset %}{% set ns.v = t * 9 %}{% endfor %}",
        length("'x' | center(10**8)"),
        length("'x' | center(width=10**8)"),
        length("'x'.center(10**8)"),
        length("('x' | safe).center(10**8)"),
        length("'x'.zfill(10**8)"),
        length("text.expandtabs(10**8)"),
        length("'%100000000d' % 1"),
        length("'%*d' % (10**8, 1)"),
        length("'%.100000000f' | format(1)"),
        length("'{:100000000}'.format(1)"),
        length("'{:{}}'.format(1, 10**8)"),
        length("'{a:100000000}'.format_map({'a': 1})"),
        length("long | indent(10**5)"),
        length("words | batch(10**8, 0) | first"),
        length("words | batch(linecount=10**8, fill_with=0) | first"),
        length("words | slice(10**8) | list"),
        length("long | wordwrap(1, wrapstring=long)"),
        length("nested | tojson(10**8)"),
        length("[[long] * 1000] * 1000 | sum(start=[])"),
        length("(words * 2000) | map('center', 10000) | join"),
        "{{ 1.5 | round(10**8, 'floor') }}",
        "{{ (1).to_bytes(10**8, 'big') }}",
        "{{ 'aaa'.translate({97: long}) }}",
        "{{ long.encode() }}",
        "{{ lipsum(10**6) }}",
    ],
)
def test_a_template_has_limits_of_size(template):
    with pytest.raises(ConfigError, match=r"cannot be rendered|lacks"):
        told(template)


SAME = [
    "{{ 2**10 * 3 }} {{ 2.0**-1 }} {{ '-' * 3 }} {{ range(3)|list }} {{ 2 * 1.5 }} {{ 7 % 4 }}",
    "{{ 'a' ~ 1 ~ none ~ words }} {{ length ~ '!' }} {{ 'x' ~ (words[1:] | join(', ')) }}",
    "{{ words[0] }} {{ words[:2] }} {{ words[::-1] }} {{ text[2:-1:2] }} {{ nested['a'][0] }}",
    "{{ words | join('-') }} {{ words | map('string') | join(', ') }} {{ '/'.join(['a', 'b']) }}",
    "{{ 'a' | center(9) }} {{ 'a'.ljust(3) }} {{ '7'.zfill(3) }} {{ text | replace('a', 'bb') }}",
    "{{ text.replace('and', 'or').upper().split(',') }} {{ text | wordwrap(5) | indent(2) }}",
    "{{ '%s is %5.1f %%' % ('it', 3) }} {{ '%s-%s' | format(1, long[:2]) }}",
    "{{ '{} {:>4} {a}'.format(1, 'b', a=length) }} {{ '{a}'.format_map({'a': 2}) }}",
    "{{ nested | tojson }} {{ nested | tojson(indent=2) }} {{ nested }} {{ nested | string }}",
    "{% for row in words | batch(3, '-') %}{{ row | join }};{% endfor %}",
    "{% for row in words | slice(2) %}{{ row | list }};{% endfor %}",
    "{% set s %}{{ words }}!{% endset %}{{ s }}{% macro m(a) %}<{{ a }}>{% endmacro %}{{ m(3) }}",
    "{% set ns = namespace(t='') %}{% for w in words %}{% set ns.t = ns.t ~ w %}{% endfor %}"
    "{{ ns.t }}",
    "{{ [1, 2.5] | sum }} {{ 2.567 | round(1) }} {{ missing | default('none') }}",
    "{{ missing is defined }} {{ words is defined and words }}",
    "{{ long | length }} {{ long | truncate(9) }} {{ words | first }} {{ words | last | string }}",
    "{{ words + [1] }} {{ 'a' + 'b' }} {{ 1 + 2 }} {{ (1, 2) + (3,) }} {{ 'x' in text }}",
    "{{ nested | dictsort }} {{ nested.a[1].b | upper }} {{ [3, 1] | sort | list }}",
]


@pytest.mark.parametrize("template", SAME)
def test_what_is_within_the_limits_is_what_jinja_makes(template):
    expected = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(template)
    assert told(template) == expected.render(FIELDS)


def test_the_budget_is_that_of_one_rendering(monkeypatch):
    path = "openenv_pipe.environments.adapters.bounded_templates.MAX_IN_ALL"
    monkeypatch.setattr(path, 25_000)
    template = BoundedEnvironment().compiled("{{ long ~ 1 }}")
    for _ in range(5):
        assert render(template, FIELDS) == FIELDS["long"] + "1"
    template = BoundedEnvironment().compiled("{{ long ~ 1 }}{{ long ~ 2 }}")
    with pytest.raises(ValueError, match="25000 characters and elements in all"):
        render(template, FIELDS)
