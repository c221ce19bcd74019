"""The command finds words, starts their programs, and says what it does not know."""

import argparse
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

import kenotron_command.word as word_module
from kenotron_command import GROUP, Word, called, fail, framed, installed_words, main, printable
from kenotron_command.completion import SHELLS, completion, flags_of

STARTED = []


def count() -> int:
    STARTED.append(list(sys.argv))
    if "--help" in sys.argv:
        count_parser().parse_args(sys.argv[1:])
    return 3 if "--bad" in sys.argv else 0


def count_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kenotron count")
    parser.add_argument("--bad", action="store_true")
    commands = parser.add_subparsers()
    commands.add_parser("lines").add_argument("--blank")
    return parser


PLACE = "test_command"
COUNT = Word("count it's words", "kenotron count --bad", f"{PLACE}:count", f"{PLACE}:count_parser")
LINES = Word("count lines", "kenotron lines", f"{PLACE}:count", f"{PLACE}:count_parser", ("lines",))


@pytest.fixture(autouse=True)
def words(monkeypatch):
    found = [
        EntryPoint("lines", f"{PLACE}:LINES", GROUP),
        EntryPoint("count", f"{PLACE}:COUNT", GROUP),
    ]
    monkeypatch.setattr(word_module, "entry_points", lambda group: found)
    monkeypatch.setattr(sys, "argv", ["kenotron"])
    STARTED.clear()
    return found


@pytest.mark.smoke
def test_a_word_starts_its_program_with_its_own_arguments(capsys):
    assert list(installed_words()) == ["count", "lines"]
    assert main(["count", "--bad"]) == 3 and main(["lines", "a"]) == 0
    assert STARTED == [["kenotron", "--bad"], ["kenotron", "lines", "a"]]
    assert capsys.readouterr().out == ""


def test_the_list_has_a_line_for_each_word(capsys):
    for arguments in ([], ["--help"], ["help"]):
        assert main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "  count       count it's words" in lines and "  lines       count lines" in lines
        assert any(line.startswith("  completion  ") for line in lines)
    assert main(["--version"]) == 0


@pytest.mark.parametrize("arguments", [["count", "--help"], ["help", "count"]])
def test_help_ends_with_an_example(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "usage: kenotron count" in said and said.endswith("\nexample:\n  kenotron count --bad\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["cuont"], "there is no command 'cuont'; did you mean count? (commands: count, lines)"),
        (["help", "x"], "there is no command 'x' (commands: count, lines)"),
        (["completion"], "completion : name one shell of bash, zsh, fish"),
        (["completion", "csh"], "completion csh: name one shell of bash, zsh, fish"),
    ],
)
def test_bad_input_is_a_line_and_status_2(capsys, arguments, told):
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"error: {told}\n"


def test_two_programs_with_one_word_are_named(words, capsys):
    words.append(EntryPoint("count", "other:COUNT", GROUP))
    assert main(["count"]) == 2
    said = capsys.readouterr().err
    assert f"the word count is that of {PLACE}:COUNT and of other:COUNT: uninstall" in said


def test_without_programs_the_list_says_so(words, capsys):
    words.clear()
    assert main([]) == 0 and "no program is installed" in capsys.readouterr().out
    assert main(["count"]) == 2
    assert "(commands: none: no program is installed that adds commands)" in capsys.readouterr().err


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_words_flags_and_subcommands(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for known in ("count", "lines", "blank", "bad"):
        assert known in script
    if shell == "bash":
        done = subprocess.run(["bash", "-c", f"{script}\n{ASKED}"], capture_output=True, text=True)
        assert done.stdout.split() == ["count", "--bad"] and done.returncode == 0, done.stderr


ASKED = """
COMP_WORDS=(kenotron co) COMP_CWORD=1; _kenotron; echo ${COMPREPLY[@]}
COMP_WORDS=(kenotron count --b) COMP_CWORD=2; _kenotron; echo ${COMPREPLY[0]}
"""


def test_flags_of_a_subcommand_are_its_own():
    parser = count_parser()
    assert set(flags_of(parser)) == {"--help", "--bad", "lines", "--blank"}
    assert set(flags_of(LINES.flags())) == {"--help", "--blank"}
    assert set(flags_of(COUNT.flags())) == set(flags_of(parser))
    assert "it'\\''s" in completion("fish", {"count": parser}, {"count": COUNT.summary})


def test_a_program_is_called_as_it_was_started(monkeypatch):
    for own, words, want in [
        ("/bin/kenotron", (), "kenotron train"),
        ("/bin/kenotron", ("verify",), "kenotron verify"),
        ("/bin/kenotron", ("--config-file", "a"), "kenotron train --config-file a"),
        ("/bin/kenotron-train", ("verify",), "kenotron-train verify"),
        ("apps/train/__main__.py", ("verify",), "python apps/train verify"),
    ]:
        monkeypatch.setattr(sys, "argv", [own])
        assert called("python apps/train", words, name="kenotron-train") == want
    monkeypatch.setattr(sys, "argv", ["/bin/kenotron"])
    assert called("python -m kenotron_ckpt") == "kenotron"  # its subcommands are words
    monkeypatch.setattr(sys, "argv", ["kenotron_ckpt/__main__.py"])
    assert called("python -m kenotron_ckpt") == "python -m kenotron_ckpt"


def raising(error):
    def work():
        raise error

    return work


def test_a_known_error_is_a_line_and_a_status(capsys):
    assert framed(lambda: 3) == 3
    for error, status in [(ValueError("no \x1b[31m"), 1), (KeyboardInterrupt(), 130)]:
        assert framed(raising(error), ValueError) == status
    assert capsys.readouterr().err == "error: no \ufffd[31m\nerror: interrupted\n"
    assert framed(raising(OSError("a")), ValueError, OSError, status=2) == 2
    with pytest.raises(TypeError):
        framed(raising(TypeError("a mistake in the program")), ValueError)


def test_an_error_may_be_explained_and_reported_in_another_way(capsys):
    told = []
    given = {
        "explain": lambda error: (f"it: {error}", 75),
        "report": lambda *a: told.append(a) or 9,
    }
    assert framed(raising(OSError("a")), **given) == 9 and told == [("it: a", 75)]
    with pytest.raises(OSError, match="b"):
        framed(raising(OSError("b")), OSError, explain=lambda error: None)
    assert fail("", 75) == 75 and capsys.readouterr().err == ""


def test_a_reader_that_has_seen_enough_changes_no_status():
    code = "from kenotron_command import framed; framed(lambda: print('x' * 10**6) or 1)"
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as job:
        job.stdout.read(1)
        job.stdout.close()
        assert job.stderr.read() == b""
    assert job.returncode == 0


def test_control_characters_do_not_reach_a_terminal():
    assert printable("a\x1b[2J\x07é\tb\nc\x9b") == "a\ufffd[2J\ufffdé\tb\nc\ufffd"
