"""GBNF as Lark: the same texts, and errors by line."""

from __future__ import annotations

import pytest

from engine.grammar.backend import GrammarError
from engine.grammar.lowering.gbnf import gbnf_to_lark, is_gbnf
from engine.runtime.grammar_use import GrammarKind, GrammarSpec

from ..byte_grammar import ByteGrammar

JSON = r"""# a comment
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("text", "accepted", "refused"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["maybe", ""]),
        (JSON, ['{"a":[1,2.5,"x\\n",null]}', "{}", '{"a": {"b": true}}'], ["{a}", "[1]", '{"a":}']),
        (
            'root ::= (expr "=" term "\\n")+\nexpr ::= term ([-+*/] term)*\n'
            'term ::= num | "(" expr ")"\nnum ::= [0-9]+\n',
            ["1+2=3\n", "(1*2)=4\n5=5\n"],
            ["1+=2\n"],
        ),
        (
            'root ::= move-List+ [^\\n] . "\\t" [\\]\\-a] "/"\nmove-List ::= "é"{2,}',
            ["éé/x\t]/", "éééxy\t-/"],
            ["é", "ééx\n\tb/"],
        ),
        ('root ::= A start Start\nA ::= "a"\nstart ::= "b" | ""\nStart ::= "c"', ["abc", "ac"], ["bc"]),
        (r'root ::= "\x41\u00e9\U0001F600" [\x41-\x43]{2} "a"{0,1}', ["Aé😀ABa", "Aé😀CC"], ["Aé😀A"]),
        ('root ::= ("a" | "b" root)?', ["", "a", "bba"], ["ab"]),
    ],
)
def test_it_accepts_the_same_texts(text, accepted, refused):
    assert is_gbnf(text)
    grammar = ByteGrammar(GrammarSpec(GrammarKind.LARK, gbnf_to_lark(text, "grammar")))

    assert grammar.error == ""
    assert [each for each in accepted if not grammar.accepts(each)] == []
    assert [each for each in refused if grammar.accepts(each)] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('root ::= "a', "line 1: a string is not closed"),
        ('root ::= "a"\nx ::= b', "line 2: the rule b is not defined"),
        ("root ::= (a", "line 1: a group is not closed"),
        ('a ::= "b"', "has no rule root"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule root is there twice"),
        ('root = "a"', '"::=" is missing'),
        ("root ::= [z-a]", "the range z-a is reversed"),
        ("root ::= []", "a class in brackets is empty"),
        ('root ::= "a" )', "')' is not expected"),
        ('root ::= "\\q"', r"\q is no escape"),
        ('root ::= "a"{3,1}', "has more as its least"),
        ('root ::= "a"{x}', "begins no repetition"),
        ("root ::= " + "(" * 2000, "nested more than 100 deep"),
        ('::= "a"', "the name of a rule is expected"),
    ],
)
def test_errors_have_the_line(text, message):
    with pytest.raises(GrammarError) as caught:
        gbnf_to_lark(text, "grammar")

    assert caught.value.code == "invalid_grammar"
    assert caught.value.message.startswith("grammar: ") and message in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        'start: "a"',
        "// x\n%llguidance {}\nstart[lazy]: /a/",
        '?start: a\na: "::="',
        '%ignore / /\nstart: "a" ":" "b"',
        "",
        " " * 100_000,
        "# no rule at all",
    ],
)
def test_lark_is_told_from_gbnf(text):
    assert not is_gbnf(text)
