"""Docstrings of Google's style are read into their parts."""

from fedstrata.base.docstrings import read

FULL = """Step, and
    step again.

    $$ x = y $$

    Args:
        step_size: the step,
            which is long: a number.
        a, b: two numbers.
        **options: others.

    Converges to:
        - a minimum, on lines
          of its own;
        - nothing else.

    Does not:
        anything more.

    - *First* point
      continues.
    - Second point.

    This ends in a colon:
    and no indented line follows.

    Reference: nobody2020, Algorithm 1.
    """


def test_every_part_is_found():
    parts = read(FULL)
    assert parts.summary == "Step, and step again."
    assert parts.arguments() == {
        "step_size": "the step, which is long: a number.",
        "a": "two numbers.",
        "b": "two numbers.",
        "options": "others.",
    }
    assert parts.items("Converges to") == ["a minimum, on lines of its own;", "nothing else."]
    assert parts.items("Does not") == ["anything more."]
    assert parts.bullets == ("*First* point continues.", "Second point.")
    assert parts.paragraphs[0] == "$$ x = y $$"
    assert parts.paragraphs[1] == "This ends in a colon: and no indented line follows."
    assert parts.starting("Reference:") == "Reference: nobody2020, Algorithm 1."


def test_missing_parts_are_empty():
    for source in ("", object(), type("Bare", (), {})):
        parts = read(source)
        assert parts.summary == ""
        assert parts.arguments() == {}
        assert parts.items("Converges to") == []
        assert parts.starting("Reference:") == ""


def test_a_docstring_of_a_class_is_not_that_of_its_parent():
    class Parent:
        """Words."""

    class Child(Parent):
        pass

    assert read(Parent).summary == "Words."
    assert read(Child).summary == ""


def test_a_section_ends_at_the_margin():
    parts = read("One.\n\nArgs:\n    a: first.\n\n    b: second.\nAnd more.\n\nLast.")
    assert parts.arguments() == {"a": "first.", "b": "second."}
    assert parts.paragraphs == ("And more.", "Last.")
