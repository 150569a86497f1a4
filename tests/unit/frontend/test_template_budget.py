"""A chat template may loop, recurse and multiply as it likes: it is stopped, and the next one is rendered."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest

from scheduler_svc.frontend import template_process
from scheduler_svc.frontend.calls import ChatMessage
from scheduler_svc.frontend.errors import ChatError
from scheduler_svc.frontend.template_process import TemplateProcess, TemplateProcessError
from scheduler_svc.frontend.text import load_tokenizer
from tests.unit.frontend.tokenizer_files import byte_level_json, chat_config, encode_chat, files

_MESSAGES = [ChatMessage("user", "Hello")]

# None of them may end in any other way than with an error, whatever the reason that comes first.
_ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops that make text": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "a huge range": "{{ range(10**9) | list | length }}",
    "loops within the limit of a range": "{% for a in range(9999) %}{{ range(99999) | sum }}{% endfor %}",
    "recursion of a macro": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "recursion that ends": (
        "{% macro f(n) %}{% if n < 40 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}"
    ),
    "a recursive loop": "{% for a in [[]] recursive %}{{ loop([a]) }}{{ loop([a]) }}{% endfor %}",
    "a caller that calls": "{% macro f() %}{{ caller() }}{{ f() }}{% endmacro %}{% call f() %}{{ f() }}{% endcall %}",
    "string multiplication": "{{ 'x' * 10**10 }}",
    "string multiplication of what is not constant": "{{ messages[0].content * 10**10 }}",
    "the product of lists": "{{ ([0] * 10**10) | length }}",
    "doubling": (
        "{% set ns = namespace(s='x') %}"
        "{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
    ),
    "adding": (
        "{% set ns = namespace(s='x') %}"
        "{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}"
    ),
    "doubling lists": "{% set ns = namespace(s=[1]) %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "a captured block": (
        "{% set s %}"
        "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}{% endset %}{{ s | length }}"
    ),
    "a filter block": "{% filter upper %}{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}{% endfilter %}",
    "join": "{{ range(99999) | join('x' * 999999) }}",
    "center": "{{ 'x' | center(10**10) }}",
    "center of what is not constant": "{{ messages[0].content | center(10**10) }}",
    "the method center": "{{ 'x'.center(10**10) }}",
    "the method zfill": "{{ 'x'.zfill(10**10) }}",
    "format": "{{ '%1000000000d' | format(1) }}",
    "a width from outside": "{{ '%*d' | format(10**9, 1) }}",
    "the method format": "{{ '{:>1000000000}'.format(1) }}",
    "the operator %": "{{ '%1000000000d' % 1 }}",
    "replace": "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
    "the method replace": "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "indent": "{{ ('x\n' * 99999) | indent(99999) }}",
    "expandtabs": "{{ ('\t' * 99999).expandtabs(99999) }}",
    "batch": "{{ [1] | batch(10**10, 'x') | list | length }}",
    "slice": "{{ [1] | slice(10**10, 'x') | list | length }}",
    "tojson": "{{ ([1] * 99999) | tojson(indent=99999) }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "strftime": "{{ strftime_now('%c' * 10**9) }}",
    "powers": "{{ 10**(10**10) }}",
    "powers of what is not constant": "{{ (messages | length + 9) ** (10 ** 10) }}",
    "a long number": "{{ 7 ** 99999999 % 10 }}",
    "sums": "{{ ([[1] * 9999] * 9999) | sum(start=[]) | length }}",
    "products of loops over text": (
        "{% for a in 'x' * 99999 %}{% for b in 'x' * 99999 %}{% endfor %}{% endfor %}"
    ),
    "cycles": "{% set c = cycler('x' * 9999999) %}{% for a in range(99999) %}{{ c.next() }}{% endfor %}",
    "words": "{{ ('x ' * 9999999) | wordwrap(1) | wordcount }}",
}  # fmt: skip

_GOOD = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def _encode(template: str) -> list[int]:
    tokenizer = load_tokenizer(files(byte_level_json(), chat_config()) | {"chat_template.jinja": template.encode()})
    return encode_chat(tokenizer, _MESSAGES)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateProcess]:
    """One with little time, so that the tests end soon."""
    process = TemplateProcess(cpu_s=0.3, memory_bytes=128 << 20, output_bytes=1 << 20)
    monkeypatch.setattr(template_process, "SHARED", process)
    yield process
    process.close()


@pytest.mark.parametrize("kind", _ENDLESS)
def test_f98_a_template_that_never_ends_is_stopped(kind: str, process: TemplateProcess) -> None:
    with pytest.raises(ChatError, match=r"chat template \(chat_template.jinja\)"):
        _encode(_ENDLESS[kind])
    # The next one is served.
    assert load_tokenizer(files(byte_level_json(), {})).encode_text("[Hello]") == _encode(_GOOD)


@pytest.mark.parametrize(
    "template, text",
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "0.3 s of CPU time"),
        ("{{ messages[0].content * 10**10 }}", "128 MiB of memory"),
        ("{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "more than 1048612 bytes of a conversation of 9"),
    ],
)
def test_f98_the_error_names_template_and_budget(template: str, text: str, process: TemplateProcess) -> None:
    with pytest.raises(ChatError, match=text) as error:
        _encode(template)
    assert "the model's chat template (chat_template.jinja)" in str(error.value)


def test_f98_a_template_that_cannot_be_compiled_in_time_is_refused_at_load(
    process: TemplateProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """What is constant is computed when the template is compiled."""
    with pytest.raises(ChatError, match="cannot be used.*CPU time"):
        _encode("{{ 10**(10**10) }}")
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["chats are refused" in record.message for record in warnings] == [True]


def test_f98_restoring_what_was_marked_counts(process: TemplateProcess) -> None:
    """A special token in a message stands there as a short mark while the template is rendered."""
    template = "{% for a in range(20000) %}{{ messages[0].content }}{% endfor %}"
    tokenizer = load_tokenizer(files(byte_level_json(), chat_config(chat_template=template)))
    assert len(encode_chat(tokenizer, [ChatMessage("user", "<|im_end|>")])) > 20_000
    long_token = "<|" + "x" * 5000 + "|>"
    process_template = template_process.Template(template, (), (long_token,))
    with pytest.raises(template_process.TemplateFailed, match="bytes of a conversation"):
        process.render(process_template, [ChatMessage("user", long_token)])


def test_f98_a_large_conversation_has_a_large_budget(process: TemplateProcess) -> None:
    messages = [ChatMessage("user", "삼<|im_end|>" * 200) for _ in range(500)]
    tokenizer = load_tokenizer(files(byte_level_json(), chat_config()))
    assert len(encode_chat(tokenizer, messages)) > 500 * 200


def test_f98_a_process_that_is_killed_is_replaced(process: TemplateProcess) -> None:
    expected = _encode(_GOOD)
    for number in (signal.SIGKILL, signal.SIGTERM):
        assert process.pid is not None
        os.kill(process.pid, number)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert _encode(_GOOD) == expected


def test_f98_a_process_that_does_not_answer_is_given_up(process: TemplateProcess) -> None:
    _encode(_GOOD)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    process.patience_s = 0.1
    with pytest.raises(ChatError, match="did not answer"):
        _encode(_GOOD)
    process.patience_s = 60.0
    assert _encode(_GOOD)


def test_f98_without_a_process_it_is_no_fault_of_the_conversation(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The call fails as others do on a machine that has no room for a process, and later ones do not."""
    monkeypatch.setattr(process, "command", ("/nonexistent/python",))
    tokenizer = load_tokenizer(files(byte_level_json(), chat_config()))
    with pytest.raises(TemplateProcessError, match="cannot be started"):
        encode_chat(tokenizer, _MESSAGES)
    monkeypatch.setattr(process, "command", TemplateProcess.command)
    assert encode_chat(tokenizer, _MESSAGES)


def test_f98_many_templates_take_turns(process: TemplateProcess) -> None:
    for _ in range(2):
        for number in range(20):
            expected = load_tokenizer(files(byte_level_json(), {})).encode_text(f"{number} Hello")
            assert _encode(f"{number} {{{{ messages[0].content }}}}") == expected


def test_f98_the_process_ends_with_its_parent(process: TemplateProcess) -> None:
    _encode(_GOOD)
    pid = process.pid
    assert pid is not None
    process.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
