"""Templates that want out, or want everything: each ends soon, with a clear error, or harmlessly."""

from __future__ import annotations

import itertools
import resource
import threading
import time

import pytest

from quire.chat.templates.template import ChatTemplate
from quire.observe.errors import BadModelFile, BadRequest

GROW = "{{% set ns = namespace(x={0}, y={0}) %}}{{% for i in range(27) %}}{1}{{% endfor %}}{2}"
NEST = "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"
STOPPED = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that call nothing": "{% set l = range(20000)|list %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "text times number": "{{ 'a' * 10**10 }}",
    "number times text": "{{ 10**10 * 'a' }}",
    "list times number": "{{ ([0] * 10**10)|length }}",
    "wide %": "{{ '%1000000000d' % 1 }}",
    "star %": "{{ '%*d' % (1000000000, 1) }}",
    "wide format filter": "{{ '%1000000000d'|format(1) }}",
    "wide format": "{{ '{:1000000000}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "wide format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "center": "{{ 'a'|center(10**10) }}",
    "indent": "{{ 'a'|indent(10**9) }}",
    "tojson indent": "{{ [1]|tojson(indent=10**9) }}",
    "strftime": "{{ strftime_now('%1000000000Y') }}",
    "doubling by ~": GROW.format("'aaaa'", "{% set ns.x = ns.x ~ ns.x %}", ""),
    "doubling by +": GROW.format("'aaaa'", "{% set ns.x = ns.x + ns.x %}", ""),
    "doubling by set": GROW.format("'aaaa'", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}", ""),
    "nested printed": GROW.format("['a']", NEST, "{{ ns.x }}"),
    "nested as json": GROW.format("['a']", NEST, "{{ ns.x|tojson }}"),
    "nested compared": GROW.format("['a']", NEST, "{{ ns.x == ns.y }}"),
    "nested looked for": GROW.format("['a']", NEST, "{{ ns.x in [ns.y] }}"),
    "nested unique": GROW.format("['a']", NEST, "{{ [ns.x, ns.y]|unique|list|length }}"),
    "nested selected": GROW.format("['a']", NEST, "{{ [ns.x]|select('eq', ns.y)|list|length }}"),
    "nested as text": GROW.format("['a']", NEST, "{{ ns.x|upper }}"),
    "replace": "{{ ('a' * 900000).replace('a', 'b' * 900000)|length }}",
    "replace filter": "{{ ('a' * 900000)|replace('a', 'b' * 900000)|length }}",
    "join": "{{ ('x' * 900)|list|join('y' * 900000)|length }}",
    "join method": "{{ ('y' * 900000).join(('x' * 900)|list)|length }}",
    "power": "{{ 10**(10**8) }}",
    "big integers": GROW.format("9**1000", "{% set ns.x = ns.x * ns.x %}", ""),
    "round": "{{ 1.5|round(10**9) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list|length }}",
    "slice filter": "{{ [1]|slice(10**9)|list|length }}",
    "lists by map": "{{ ([range(99999)] * 900)|map('list')|list|length }}",
    "slices": "{% set s = 'a' * 900000 %}{% set ns = namespace(x=[]) %}"
    "{% for i in range(600) %}{% set ns.x = ns.x + [s[i:]] %}{% endfor %}",
    "splits": "{% set s = 'a ' * 400000 %}{% for i in range(99999) %}{% set x = s.split(' ') %}{% endfor %}",
    "sorting": "{% set l = range(99999)|list %}{% for i in range(99999) %}{% set x = l|sort %}{% endfor %}",
    "hoarding": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = ns.x + ['a' * 900000 ~ i] %}{% endfor %}",
    "output": "{% set s = 'a' * 900000 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "constant output": "{% for i in range(99999) %}" + "x" * 5000 + "{% endfor %}",
    "output in a macro": "{% macro f() %}{% for i in range(99999) %}"
    + "x" * 5000
    + "{% endfor %}{% endmacro %}{{ f()|length }}",
    "output in a set": "{% set s = 'a' * 900000 %}{% set y %}{% for i in range(9999) %}{{ s }}{% endfor %}{% endset %}",
    "macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro with many ends": "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "loop without end": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "callers": "{% macro d() %}{{ caller() }}{% endmacro %}{% for i in range(99999) %}{% call d() %}{% for j in range(99999) %}{% endfor %}{% endcall %}{% endfor %}",
}
STOPPED["a list that grows as it is read"] = "{% set l = [1] %}{% for x in l %}{{ l.append(x) or '' }}{% endfor %}"
NO_WAY_OUT = {
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "by item": "{{ ''['__class__']['__mro__'] }}",
    "self": "{{ self.__init__.__globals__ }}",
    "namespace": "{{ namespace.__init__.__globals__['os'].system('id') }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "attr": "{{ ''|attr('__class__') }}",
    "attr by map": "{{ ['']|map('attr', '__class__')|list }}",
    "attribute by map": "{{ ['']|map(attribute='__class__')|list|first|length }}",
    "format field": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format as a filter": "{{ ['{0.__class__}'.format]|map('string')|join }}{{ ''.format.__self__ }}",
    "globals of a function": "{{ raise_exception.__globals__['sys'] }}",
    "closure": "{{ strftime_now.__closure__[0].cell_contents }}",
    "generator frame": "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "loop": "{% for x in [1] %}{{ loop.__init__.__globals__.os }}{% endfor %}",
    "macro": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "private namespace": "{% set ns = namespace(__class__=1) %}{{ ns }}",
    "changing messages": "{{ messages.append(1) }}",
    "changing a list in a message": "{% set f = messages[0].l.pop %}{{ f() }}",
    "a list in itself": "{% set l = [] %}{{ l.append(l) }}",
    "a list in a list": "{% set l = [] %}{{ l.append([]) }}",
    "clearing": "{% set l = [1] %}{{ l.clear() }}",
    "changing a message": "{{ messages[0].update({'role': 'system'}) }}",
    "a method not listed": "{{ 'a'.encode('utf-16') }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as x %}",
    "extends": "{% extends '/etc/passwd' %}",
    "autoescape": "{% autoescape true %}{{ 'a' }}{% endautoescape %}",
}
NOT_COMPILED = {
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "many nots": "{{ " + "not " * 20000 + "1 }}",
    "many loops": "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
    "many terms": "{{ " + "+".join(["1"] * 20000) + " }}",
}
# Stopped by the clock; all the others by what they ask for, before they get it, however much time there is.
BY_CLOCK = {
    "nested loops",
    "loops that call nothing",
    "filtered loops",
    "lists by map",
    "sorting",
    "macro with many ends",
    "callers",
    "a list that grows as it is read",
}
MESSAGES = [{"role": "user", "content": "x", "l": [1]}]


@pytest.mark.parametrize("name", STOPPED)
def test_stopped_in_time_and_space(name: str):
    template = ChatTemplate(STOPPED[name], seconds=0.5 if name in BY_CLOCK else 60)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(BadRequest, match="the chat template was stopped") as caught:
        template.render(MESSAGES)
    assert ("seconds" in caught.value.message) == (name in BY_CLOCK)
    assert time.process_time() - start < 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024  # KiB


@pytest.mark.parametrize("name", NO_WAY_OUT)
def test_no_way_out(name: str):
    try:
        text = ChatTemplate(NO_WAY_OUT[name]).render(MESSAGES)
    except (BadRequest, BadModelFile):
        return
    assert text in ("", "0", "{0.__class__}") or "bounded" in text  # undefined prints as nothing
    assert "<class" not in text and "module" not in text and "root:" not in text


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_not_compiled(name: str):
    with pytest.raises(BadModelFile):
        ChatTemplate(NOT_COMPILED[name])


def test_compiling_runs_nothing():
    start = time.process_time()
    ChatTemplate(
        "{{ 'a'|center(10**10) }}{{ 'a' * 10**10 }}{{ ('a' * 10**6)|replace('a', 'b' * 10**6) }}{{ 10 ** 10 ** 10 }}"
    )
    assert time.process_time() - start < 2


def test_the_clock_works_in_any_thread_and_each_render_has_its_own():
    slow, quick = ChatTemplate(STOPPED["nested loops"], seconds=0.3), ChatTemplate("{{ messages[0].content }}")
    caught: list[str] = []

    def run() -> None:
        try:
            slow.render(MESSAGES)
        except BadRequest as error:
            caught.append(error.message)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert quick.render(MESSAGES) == "x"
    for thread in threads:
        thread.join(20)
    assert len(caught) == 2 and all("seconds" in message for message in caught)


def test_a_long_conversation_is_not_hostile():
    messages = [{"role": "user", "content": "word " * 20_000}, {"role": "assistant", "content": "ok " * 20_000}] * 10
    source = "{% for m in messages %}{{ '<' + m.role + '>' + m.content|trim + '\n' }}{% endfor %}"
    assert len(ChatTemplate(source, seconds=20).render(messages)) > 1_500_000


def test_a_machine_that_is_busy_with_others_stops_no_template(monkeypatch: pytest.MonkeyPatch):
    """Hours pass between two steps, and the thread did next to nothing in them."""
    hours = itertools.count(0.0, 3600.0)
    monkeypatch.setattr("quire.chat.templates.budget.time.monotonic", lambda: next(hours))
    template = ChatTemplate("{% for i in range(10) %}{{ messages[0].content }}{% endfor %}", seconds=5)
    assert template.render(MESSAGES) == "x" * 10
    with pytest.raises(BadRequest, match=r"more than 0\.3 seconds"):
        ChatTemplate(STOPPED["nested loops"], seconds=0.3).render(MESSAGES)
