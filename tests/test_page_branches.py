"""The chat page in a real browser: the tree of branches, and tokens with their alternatives."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from browser import BINARY, Page
from page_cases import HOSTILE
from test_page_browser import (
    ALT,
    answers,
    assert_harmless,
    browser,
    finished,
    live,
    page,
    played,
    say,
    say_on_a_phone,
    stage,
    visit,
)
from test_server_harness import THOUGHT, Scripted, Served, tiny

__all__ = ["browser", "live", "page", "played", "stage"]

pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(BINARY is None, reason="there is no chromium (apt-get install chromium)")]

FRANCE, ITALY = "What is the capital of France?", "What is the capital of Italy?"
MORE = ["What is 7 plus 5?", "Which month comes after March?"]


def rows(page: Page) -> list[str]:
    """The tree: a line for each row, indented by its level, the current one with a star."""
    return list(page.eval("""[...document.querySelectorAll("#tree [role=treeitem]")].map((row) =>
        "  ".repeat(row.ariaLevel - 1) + row.querySelector(".label").innerText
        + ` ${row.querySelector(".count").innerText}` + (row.ariaSelected === "true" ? " *" : ""))"""))


def tokens(page: Page) -> list[str]:
    return list(page.eval("[...document.querySelectorAll('.answer:last-child .token')].map((node) => node.innerText)"))


def questions(page: Page) -> list[str]:
    return list(page.eval("[...document.querySelectorAll('.user .bubble')].map((node) => node.innerText.trim())"))


def reused(page: Page) -> tuple[int, int]:
    """Tokens of the last prompt that were reused, and all of them."""
    found = page.eval("[...document.querySelectorAll('.reuse')].at(-1).innerText")
    cached, prompt = map(int, re.search(r"(\d+) of (\d+) reused", found).groups())  # type: ignore[union-attr]
    return cached, prompt


def bodies(page: Page) -> list[dict[str, Any]]:
    """What the page has asked for."""
    sent = [event["request"] for event in page.seen("Network.requestWillBeSent")]
    return [json.loads(request["postData"]) for request in sent if request["url"].endswith("/chat/completions")]


def edit_last(page: Page, text: str) -> None:
    page.click("#input")
    page.press("ArrowUp")
    page.wait("document.activeElement.matches('.edit textarea')")
    page.eval("document.activeElement.select()")
    page.type(text)
    page.press("Enter")
    page.wait("!document.querySelector('.edit')")
    finished(page)


def want_tokens(page: Page) -> None:
    """Switches alternatives on in the settings."""
    page.click("#settings-button")
    page.eval("document.querySelector('[name=alternatives]').value = 'on'")
    page.click("#settings-form [type=submit]")
    page.wait("!document.querySelector('#settings').open")


def inspect(page: Page) -> None:
    page.click(".answer .inspect")
    page.wait("document.querySelector('.answer:last-child.inspected .token')")


def click_token(page: Page, place: int) -> None:
    """Clicks the token in its first line, and waits for the menu."""
    page.eval(f"document.querySelectorAll('.answer:last-child .token')[{place}].id = 'wanted'")
    page.click("#wanted")
    page.eval("document.querySelector('#wanted').removeAttribute('id')")
    page.wait("document.querySelector('.alternatives:popover-open button')")


def alternatives(page: Page) -> list[tuple[str, str]]:
    found = page.eval("""[...document.querySelectorAll(".alternatives button")].map((row) =>
        [row.querySelector("code").innerText, row.querySelector("span").innerText])""")
    return [(text, share) for text, share in found]


# The tree


def test_branches_of_a_conversation(page: Page, live: str) -> None:
    """Edit, regenerate, continue from another point; switch, reload. Each branch resumes where it left its own past."""
    visit(page, live)
    say(page, FRANCE)
    assert not page.eval("document.querySelector('#branches').checkVisibility()"), "one branch is no tree"
    say(page, MORE[0])
    edit_last(page, MORE[1])
    assert page.text("#branch-count") == "2 branches" and rows(page) == [
        f"{FRANCE} 2", f"  {MORE[0]} 2", f"  {MORE[1]} 2 *"]
    cached, prompt = reused(page)
    assert cached > prompt / 2 > 10, "what is before the edit is not read again"

    page.click("[title=Regenerate]")
    page.wait("document.querySelector('.answer:last-child .pager')")
    finished(page)
    assert rows(page)[2:] == [f"  {MORE[1]} 1", f"    {answers(page)[1]} 1", f"    {answers(page)[1]} 1 *"]

    shown = page.eval("document.querySelectorAll('.answer')[0].querySelector('.figures').innerText")
    page.eval("document.querySelectorAll('.answer')[0].querySelector('[title=\"Continue from here\"]').click()")
    assert page.count(".message") == 2 and shown == page.text(".figures")
    assert page.eval("document.activeElement.id") == "input" and [row for row in rows(page) if row.endswith("*")] == [
        f"{FRANCE} 2 *"]
    say(page, ITALY)
    cached, prompt = reused(page)
    assert cached > prompt / 2 and page.text("#branch-count") == "4 branches"
    assert rows(page)[-1] == f"  {ITALY} 2 *" and questions(page) == [FRANCE, ITALY]

    page.click("#tree [role=treeitem]:nth-child(2)")
    assert questions(page) == [FRANCE, MORE[0]] and rows(page)[1] == f"  {MORE[0]} 2 *"
    page.open(f"{live}/?again={page.eval('location.hash')}")
    page.click(".talk .open")
    assert questions(page) == [FRANCE, MORE[0]] and rows(page)[1] == f"  {MORE[0]} 2 *"
    say(page, ITALY)
    cached, prompt = reused(page)
    assert cached > 0.6 * prompt, "the branch resumes at its own end"
    assert rows(page)[1] == f"  {MORE[0]} 4 *"


def test_the_end_of_a_line_is_found_again(page: Page, live: str) -> None:
    """Who goes back without a new message still sees the tree, and comes back by it."""
    visit(page, live)
    say(page, FRANCE)
    say(page, MORE[0])
    page.eval("document.querySelector('[title=\"Continue from here\"]').click()")
    assert questions(page) == [FRANCE] and rows(page) == [f"{FRANCE} 4 *"] and page.text("#branch-count") == "1 branch"
    page.click("#tree [role=treeitem]")
    assert questions(page) == [FRANCE, MORE[0]]
    assert not page.eval("document.querySelector('#branches').checkVisibility()")


def test_keys_of_the_tree(page: Page, played: Any) -> None:
    served, _ = played("Yes.")
    visit(page, served.url)
    say(page, "one")
    say(page, "two")
    edit_last(page, "three")
    edit_last(page, "four")
    focus = "document.activeElement.querySelector('.label')?.innerText"
    page.press("r", ALT, "KeyR")
    assert page.eval(focus) == "four"
    for key, expected in (("ArrowUp", "three"), ("Home", "one"), ("ArrowRight", "two"), ("End", "four"),
                          ("ArrowDown", "four"), ("ArrowLeft", "one")):
        page.press(key)
        assert page.eval(focus) == expected, key
    page.press("ArrowLeft")
    assert rows(page) == ["one 2"] and page.eval(focus) == "one"
    assert page.eval("document.activeElement.ariaExpanded") == "false"
    page.press("ArrowRight")
    assert len(rows(page)) == 4 and page.eval(focus) == "one"
    page.press("ArrowDown")
    page.press("Enter")
    assert questions(page) == ["one", "two"] and page.eval(focus) == "two", "the keys stay in the tree"
    page.click("#tree .branch:first-child .twist")
    assert len(rows(page)) == 1
    page.click("#branches > summary")
    assert not page.eval("document.querySelector('#tree').checkVisibility()")
    page.open(f"{served.url}/?again={page.eval('location.hash')}")
    page.click(".talk .open")
    assert page.eval("document.querySelector('#branches').checkVisibility()")
    assert not page.eval("document.querySelector('#tree').checkVisibility()"), "it stays closed"
    assert len(rows(page)) == 4 and questions(page) == ["one", "two"]
    page.press("r", ALT, "KeyR")
    assert page.eval(focus) == "two" and page.eval("document.querySelector('#tree').checkVisibility()")


def test_a_branch_runs_while_another_is_shown(page: Page, played: Any) -> None:
    served, engine = played("Yes.")
    visit(page, served.url)
    say(page, "one")
    engine.play("word " * 60, pause=0.02)
    page.click("[title=Regenerate]")
    page.wait("document.querySelector('.answer.running .content').innerText.length > 5")
    page.click("#tree [role=treeitem]:nth-child(2)")
    assert answers(page) == ["Yes."] and page.count(".branch.running") == 1 and page.count(".answer.running") == 0
    page.wait("!document.querySelector('.branch.running')")
    page.click("#tree [role=treeitem]:nth-child(3)")
    assert answers(page) == [("word " * 60).strip()]


# Tokens


def test_alternatives_of_a_token(page: Page, live: str) -> None:
    """Switch them on, look at them, continue with one, go on in the conversation, reload."""
    visit(page, live)
    say(page, FRANCE)
    page.click(".answer .inspect")
    assert "came without alternatives" in page.text(".tokens")
    page.click(".tokens button")
    page.wait("document.querySelector('.answer .pager')")
    finished(page)
    whole = "The capital of France is Paris."
    assert page.text(".answer .pager") == "2 / 2" and page.count(".answer.inspected") == 1
    assert "".join(tokens(page)) == whole and not page.eval("document.querySelector('.content').checkVisibility()")
    page.click(".answer .inspect")
    assert answers(page) == [whole] and not page.eval("document.querySelector('.tokens').checkVisibility()")

    inspect(page)
    words = tokens(page)
    place = next(index for index, text in enumerate(words) if "P" in text)
    click_token(page, place)
    found = alternatives(page)
    shares = [float(share.strip("<% ")) for _, share in found]
    assert len(found) >= 5 and shares == sorted(shares, reverse=True) and sum(shares[:5]) <= 100.6
    assert page.count(".alternatives .current") == 1
    assert page.eval("document.activeElement === document.querySelector('.alternatives button')")
    ids = [int(one[0]) for one in page.eval(KEPT)["tokens"]]
    page.press("ArrowDown")
    page.press("Enter")
    page.wait("document.querySelector('.answer .pager')?.innerText === '3 / 3'")
    finished(page)
    assert page.count(".alternatives") == 0 and tokens(page)[:place] == words[:place]
    assert tokens(page)[place] == found[1][0].replace("␣", " ") and page.count(".token.chosen") == 1
    sent = bodies(page)[-1]["prefix_token_ids"]
    assert sent[:-1] == ids[:place] and sent[-1] not in (ids[place], None) and len(sent) == place + 1
    cached, prompt = reused(page)
    assert cached >= prompt - place - 2, "the prompt is not read again"
    assert rows(page)[-1].startswith("  … ") and rows(page)[-1].endswith("1 *")

    text = page.eval("document.querySelector('.answer .content').textContent.trim()")
    assert text.startswith("".join(words[:place]).strip())
    say(page, MORE[0])
    cached, prompt = reused(page)
    assert cached > prompt / 2 and len(tokens(page)) == 0
    page.open(f"{live}/?again={page.eval('location.hash')}")
    page.click(".talk .open")
    assert answers(page)[0] == text
    page.click(".answer .inspect")
    click_token(page, 0)
    assert len(alternatives(page)) >= 5


KEPT = """(async () => {
  const database = await new Promise((done) => {
    const opening = indexedDB.open("deltic", 1);
    opening.onsuccess = () => done(opening.result);
  });
  const talks = await new Promise((done) => {
    const reading = database.transaction("conversations").objectStore("conversations").getAll();
    reading.onsuccess = () => done(reading.result);
  });
  database.close();
  const talk = talks.find((one) => one.id === location.hash.slice(1));
  return talk.nodes[talk.leaf];
})()"""


def test_the_same_token_gives_the_same_answer(page: Page, live: str) -> None:
    """Greedy answers continue as they were, from every token on."""
    visit(page, live)
    page.eval("localStorage.setItem('deltic.settings', JSON.stringify({alternatives: 'on', temperature: '0'}))")
    page.open(f"{live}/?again")
    say(page, ITALY)
    whole, kept = answers(page), page.eval(KEPT)["tokens"]
    for place in (0, 2, len(kept) - 1):
        if not page.count(".answer.inspected"):
            inspect(page)
        click_token(page, place)
        page.click(".alternatives .current")
        page.wait("!document.querySelector('.alternatives')")
        page.wait("document.querySelector('.answer .figures')")
        finished(page)
        node = page.eval(KEPT)
        assert [one[0] for one in node["tokens"]] == [one[0] for one in kept] and node["begun"] == place + 1
        assert node["content"].strip() == whole[0]


def test_thinking_continues_from_a_token(page: Page, played: Any) -> None:
    """The think block stays one, and the request repeats what its prompt depends on."""
    served, engine = played(THOUGHT + "It is 4.")
    visit(page, served.url)
    want_tokens(page)
    page.eval("document.querySelector('[name=thinking]').value = 'on'")
    page.eval("document.querySelector('#settings-form').requestSubmit()")
    say(page, "2+2=")
    page.eval("document.querySelector('[name=thinking]').value = 'off'")
    page.eval("document.querySelector('#settings-form').requestSubmit()")
    inspect(page)
    shown, thinking = tokens(page), page.count(".token.thinking")
    place = next(index for index, text in enumerate(shown) if "me" in text)
    assert 0 < place < thinking < len(shown) and "".join(shown).replace("⏎", "").strip().endswith("It is 4.")
    first, tokenizer = engine.seen[-1], tiny().chat_processor.tokenizer
    rest = engine.script[place + 1:]
    engine.play("")
    engine.script = rest
    click_token(page, place)
    page.click(".alternatives .current")
    page.wait("document.querySelector('.answer .pager')?.innerText === '2 / 2'")
    finished(page)
    assert engine.seen[-1].ids == (*first.ids, *tokenizer.encode(THOUGHT)[:place + 1])
    assert tokens(page) == shown and page.count(".token.thinking") == thinking
    page.click(".answer .inspect")
    page.click(".thinking summary")
    assert page.text(".thought") == "Let me see." and answers(page) == ["It is 4."]


def test_keys_of_tokens(page: Page, played: Any) -> None:
    served, _ = played("one two three")
    visit(page, served.url)
    want_tokens(page)
    say(page, "Count")
    page.eval("document.querySelector('.inspect').focus()")
    page.press("Enter")
    page.wait("document.querySelector('.token')")
    assert page.eval("document.querySelector('.inspect').ariaPressed") == "true"
    assert page.count(".token[tabindex='0']") == 1
    page.eval("document.querySelector('.token').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    page.press("ArrowLeft")
    at = "[...document.querySelectorAll('.token')].indexOf(document.activeElement)"
    assert page.eval(at) == 1
    page.press("End")
    assert page.eval(at) == page.count(".token") - 1
    page.press("Home")
    page.press("Enter")
    page.wait("document.querySelector('.alternatives:popover-open')")
    page.press("Escape")
    page.wait("!document.querySelector('.alternatives')")
    assert page.eval(at) == 0, "the keys are back on the token"
    click_token(page, 1)
    page.click("#title")
    page.wait("!document.querySelector('.alternatives')")


def test_a_failed_continuation_is_tried_again_from_its_tokens(page: Page, played: Any) -> None:
    served, engine = played("one two three four five six")
    visit(page, served.url)
    want_tokens(page)
    say(page, "Count")
    inspect(page)
    engine.play("and so on and on and on", error="the model fell over")
    click_token(page, 2)
    page.click(".alternatives .current")
    page.wait("document.querySelector('.problem')")
    finished(page)
    begun = engine.seen[-1].ids
    engine.play(" then more")
    page.click(".problem button")
    page.wait("document.querySelector('.answer .pager')?.innerText === '3 / 3'")
    finished(page)
    assert engine.seen[-1].ids == begun and page.count(".problem") == 0
    page.click("[title=Regenerate]")
    page.wait("document.querySelector('.answer .pager')?.innerText === '4 / 4'")
    finished(page)
    assert len(engine.seen[-1].ids) == len(begun) - 3, "another answer begins at its beginning"


def test_an_alternative_that_ends_the_answer(page: Page, played: Any) -> None:
    served, engine = played("one two three")
    engine.alternative = tiny().chat_processor.tokenizer.eos_id
    visit(page, served.url)
    want_tokens(page)
    say(page, "Count")
    inspect(page)
    engine.alternative = 1
    begun = tokens(page)[:2]
    click_token(page, 2)
    assert alternatives(page)[1] == ("<|im_end|>", "< 0.1 %")
    page.press("ArrowDown")
    page.press("Enter")
    page.wait("document.querySelector('.answer .pager')?.innerText === '2 / 2'")
    finished(page)
    assert engine.seen[-1].output.max_tokens == 0
    page.click(".answer .inspect")
    assert answers(page) == ["".join(begun)] and "limit" not in page.text(".foot")


def test_hostile_tokens_stay_text(page: Page, played: Any) -> None:
    """In tokens, in their alternatives, in the tree, and after a reload."""
    hostile = "\n\n".join(HOSTILE)
    served, engine = played(hostile)
    visit(page, served.url)
    page.eval("window.owned = 0; addEventListener('securitypolicyviolation', () => { owned += 1000; })")
    want_tokens(page)
    say(page, "<img src=x onerror=owned++> <script>owned++</script>")
    inspect(page)
    assert "<img src=x onerror=owned++>" in "".join(tokens(page))
    harmless(page)
    engine.play("<script>owned++</script>")
    click_token(page, 3)
    harmless(page)
    page.click(".alternatives .current")
    page.wait("document.querySelector('.answer .pager')?.innerText === '2 / 2'")
    finished(page)
    edit_last(page, "<svg onload=owned++> <b onclick=owned++>two</b>")
    assert page.text("#branch-count") == "3 branches" and "<svg onload=owned++>" in rows(page)[-1]
    harmless(page)
    page.open(f"{served.url}/?again={page.eval('location.hash')}")
    page.click(".talk .open")
    assert len(rows(page)) == 4
    harmless(page)


@pytest.mark.parametrize("text", [*HOSTILE, "\x00\u202e\ufeff", ""], ids=range(len(HOSTILE) + 2))
def test_each_hostile_token_alone(page: Page, stage: tuple[Served, Scripted], text: str) -> None:
    """As a token, as an alternative of it, and as the name of a menu; also bytes that are no text."""
    visit(page, stage[0].url)
    data = list(text.encode())
    page.eval(f"""(async () => {{
        window.owned = 0;
        const {{TokenView, inspected, keepTokens}} = await import("/page/tokens.js");
        const one = {{token: "token_id:7", logprob: -1, bytes: {data}}};
        const node = {{id: "x", role: "assistant"}};
        keepTokens(node, [{{...one, top_logprobs: [one, {{token: "token_id:8", logprob: -9999, bytes: [255, 60]}}]}}]);
        inspected.add("x");
        const view = new TokenView(node, {{alternative: (...chosen) => {{ window.chosen = chosen; }}}});
        document.querySelector("#welcome").hidden = true;
        document.querySelector("#thread").replaceChildren(view.root);
        view.show(false);
        view.root.firstChild.click();
    }})()""")
    page.wait("document.querySelector('.alternatives:popover-open button')")
    harmless(page)
    assert alternatives(page)[1] == ("\\xff\\x3c", "< 0.1 %")
    if text.isascii() and text:
        assert page.eval("document.querySelector('.token').textContent") == text.replace("\n", "⏎\n")
    page.eval("document.querySelector('.alternatives button').click()")
    assert page.eval("[chosen[1], chosen[2][0]]") == [0, 7]


def harmless(page: Page) -> None:
    """As in other tests, and in the tree and the menu."""
    assert_harmless(page)
    wrong = page.eval("""[...document.querySelectorAll("#branches *, .alternatives, .alternatives *")].filter((node) =>
        !["summary", "svg", "use", "span", "div", "p", "button", "code", "meter"].includes(node.localName)
        || [...node.attributes].some(({name}) => name.startsWith("on"))).map((node) => node.outerHTML)""")
    assert not wrong


def test_tokens_of_another_model_are_not_sent(page: Page, played: Any) -> None:
    served, engine = played("one two")
    visit(page, served.url)
    want_tokens(page)
    say(page, "Count")
    inspect(page)
    asked = len(engine.seen)
    page.eval("(async () => (await import('/page/settings.js')).chooseModel('another', false))()")
    click_token(page, 0)
    page.click(".alternatives .current")
    page.wait("[...document.querySelectorAll('.toast')].some((node) => node.innerText.includes('of the model tiny'))")
    assert len(engine.seen) == asked and page.count(".pager") == 0


def test_long_answers_keep_the_first_tokens(page: Page, stage: tuple[Served, Scripted]) -> None:
    visit(page, stage[0].url)
    kept = page.eval("""(async () => {
        const {keepTokens} = await import("/page/tokens.js");
        const one = {token: "token_id:7", logprob: -1, bytes: [65], top_logprobs: []};
        const node = {};
        for (let chunk = 0; chunk < 100; chunk++) keepTokens(node, Array(100).fill(one));
        return node.tokens.length;
    })()""")
    assert kept == 8192


def test_on_a_phone(page: Page, played: Any) -> None:
    served, engine = played("one two three")
    page.size(360, 740, 2, phone=True)
    visit(page, served.url)
    page.eval("localStorage.setItem('deltic.settings', JSON.stringify({alternatives: 'on'}))")
    page.open(f"{served.url}/?again")
    for text in ("Count", "Again"):
        say_on_a_phone(page, text)
        page.wait("document.querySelector('.answer:last-child .figures')")
        engine.play("one two three")
    page.click("[title=Regenerate]")
    page.wait("document.querySelector('.pager')")
    finished(page)
    assert page.eval("document.querySelector('#branches').checkVisibility()")
    assert not page.eval("document.querySelector('#tree').checkVisibility()"), "small windows begin with it closed"
    page.click("#branches > summary")
    small = """[...document.querySelectorAll("button, select, .branch, #branches > summary")].filter((node) =>
        node.checkVisibility()).map((node) => [node.className, node.getBoundingClientRect()])
        .filter(([, box]) => box.width < 44 || box.height < 44).map(([name]) => name)"""
    assert page.eval(small) == []
    inspect(page)
    click_token(page, 2)
    assert page.eval(small) == [] and page.eval("document.documentElement.scrollWidth") == 360
    box = page.eval("(({left, right, top, bottom}) => [left, 360 - right, top, 740 - bottom])"
                    "(document.querySelector('.alternatives').getBoundingClientRect())")
    assert min(box) >= 0
