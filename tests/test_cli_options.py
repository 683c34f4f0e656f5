"""What commands have beside their own work: files of options, completion, tables, newcomers."""

import argparse
import inspect
import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import jaxfed as jf
from jaxfed.cli import COMMANDS, _report, main, parser_of
from jaxfed.cli._config import commands_of, with_config
from jaxfed.cli.fit import COMMANDS as algorithms
from jaxfed.cli.fit._signature import descriptions

FIT = ["fit", "perpca", "--data", "d", "--out", "o"]


@pytest.fixture
def config(tmp_path):
    def write(text):
        (tmp_path / "options.toml").write_text(text)
        return ["--config", str(tmp_path / "options.toml")]

    return write


def parsed(arguments):
    parser = parser_of({"fit", "sweep", "plan", "transform"})
    return parser.parse_args(with_config(parser, arguments))


def refused(capsys, arguments):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


# --- --config --------------------------------------------------------------------------------


def test_options_come_from_a_file_and_the_command_line_counts_first(config):
    text = 'shared-rank = 2\nlocal-rank = 1\ntol = 1e-6\nshrinkage = true\ncenter = "common"\n'
    found = parsed([*FIT, *config(text), "--local-rank", "3", "--tol=0.5"])
    assert (found.shared_rank, found.local_rank, found.tol) == (2, 3, 0.5)
    assert found.shrinkage and found.center == "common" and not found.report
    # What is required may be in the file as well, and the option stand anywhere.
    more = 'data = "d"\nout = "o"\nshrinkage = false\n'
    found = parsed(["fit", "perpca", *config(text.replace("shrinkage", "force") + more)])
    assert (str(found.data), found.force, found.shrinkage) == ("d", True, False)


def test_lists_and_negative_numbers_are_taken(config):
    text = 'prior-variance = [0.1, 1]\nseeds = -3\nout = "-odd"\n'
    found = parsed(["sweep", "hierarchical", *config(text)])
    assert found.prior_variance == [0.1, 1.0] and found.seeds == -3 and str(found.out) == "-odd"
    found = parsed(["sweep", "hierarchical", *config(text), "--prior-variance", "7"])
    assert found.prior_variance == [7.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shared_rank = 2", r"options\.toml has 'shared_rank', wanted some of .*shared-rank"),
        ("rnds = 2", r"options\.toml has 'rnds', wanted some of"),
        ("config = 'other'", "has 'config', wanted"),
        ("help = true", "has 'help', wanted"),
        ("[fit]\nrounds = 2", "has 'fit', wanted"),
        ("shrinkage = 1", "has shrinkage = 1, wanted true or false"),
        ("rounds = [1, 2]", r"has rounds = \[1, 2\], wanted one value"),
        ("rounds = true", "has rounds = True, wanted a number or a text"),
        ("rounds = 2020-01-01", "has rounds = datetime"),
        ("rounds = ", "is no TOML file"),
    ],
)
def test_what_does_not_fit_is_told_with_the_file(config, capsys, text, message):
    assert re.search(rf"^jaxfed: --config: .*{message}", refused(capsys, [*FIT, *config(text)]))


def test_a_value_of_the_wrong_kind_is_told_as_on_the_command_line(config, capsys):
    with pytest.raises(SystemExit):
        main([*FIT, *config('rounds = "many"\nshared-rank = 1\nlocal-rank = 1')])
    assert "argument --rounds: invalid int value: 'many'" in capsys.readouterr().err
    assert "nowhere.toml" in refused(capsys, [*FIT, "--config", "nowhere.toml"])


# --- personalize -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Five clients with one shared and one own direction, a result of four, the fifth's folder."""
    folder = tmp_path_factory.mktemp("personalize")
    rng = np.random.default_rng(0)
    shared = np.linalg.qr(rng.normal(size=(6, 1)))[0].T
    for name in ("old", "new"):
        (folder / name).mkdir()
    for i in range(5):
        own = np.linalg.qr(rng.normal(size=(6, 1)))[0].T
        x = 3 * rng.normal(size=(30, 1)) @ shared + 2 * rng.normal(size=(30, 1)) @ own + 5
        x += 0.1 * rng.normal(size=x.shape)
        np.save(folder / ("new" if i == 4 else "old") / f"c{i}.npy", x.astype(np.float32))
    command = ["fit", "oneshot", "--shared-rank", "1", "--local-rank", "1", "--center"]
    command += ["--held-out", "0", "--data", str(folder / "old"), "--out", str(folder / "fit")]
    assert main(command) == 0
    return folder


def test_new_clients_get_components_of_their_own(learned, tmp_path, capsys):
    command = ["personalize", str(learned / "fit"), "--data", str(learned / "new"), "--out"]
    assert main([*command, str(tmp_path / "out")]) == 0
    assert "c4" in capsys.readouterr().out
    before, after = (jf.load(path / "result.npz") for path in (learned / "fit", tmp_path / "out"))
    np.testing.assert_array_equal(after.result.shared, before.result.shared)
    samples = np.load(learned / "new" / "c4.npy")
    samples = samples - samples.mean(axis=0)
    # The best direction beside the shared one, which is the top eigenvector of what it leaves.
    rest = samples - samples @ before.result.shared @ before.result.shared.T
    best = np.linalg.svd(rest)[2][0]
    assert after.result.local.shape == (1, 6, 1) and after.clients == 1
    np.testing.assert_allclose(abs(best @ after.result.local[0, :, 0]), 1, atol=1e-5)
    (row,) = json.loads((tmp_path / "out" / "result.json").read_text())["table"]
    left = np.sum((rest - np.outer(rest @ best, best)) ** 2) / np.sum(samples**2)
    np.testing.assert_allclose(row["in neither (%)"], 100 * left, rtol=1e-2)
    # What was written is a result itself.
    options = ["--data", str(learned / "new"), "--out", str(tmp_path / "scores")]
    assert main(["transform", str(tmp_path / "out"), *options]) == 0
    assert main(["info", str(tmp_path / "out")]) == 0
    assert main([*command, str(tmp_path / "two"), "--local-rank", "2"]) == 0
    assert jf.load(tmp_path / "two" / "result.npz").result.local.shape == (1, 6, 2)


def test_what_cannot_be_personalized_is_said(learned, tmp_path, capsys):
    with np.load(learned / "fit" / "result.npz") as stored:
        arrays = dict(stored)

    def attempt(**others):
        np.savez(tmp_path / "other.npz", **(arrays | others))
        command = ["personalize", str(tmp_path / "other.npz"), "--data", str(learned / "new")]
        capsys.readouterr()
        return refused(capsys, [*command, "--out", str(tmp_path / "out")])

    around = np.repeat(arrays["shared"][None], 4, axis=0)
    assert "by a prior that is not in it" in attempt(local=around)
    header = json.loads(str(arrays["header"]))
    for part, message in (("shared", "no shared components"), ("local", "--local-rank: wanted")):
        without = json.dumps(header | {"parts": header["parts"] | {part: None}})
        assert message in attempt(header=np.asarray(without))
    assert "wanted what jaxfed fit wrote of the PCA family" in attempt(features=np.arange(3))
    assert not (tmp_path / "out").exists()


# --- completion ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    pytest.importorskip("shtab")
    path = tmp_path_factory.mktemp("completion") / "jaxfed.bash"
    run = [sys.executable, "-m", "jaxfed", "completion", "bash"]
    path.write_text(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    return path


COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
$(complete -p jaxfed | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.slow
def test_bash_completes_commands_options_and_choices(script, tmp_path):
    def offered(*words):
        run = ["bash", "-c", COMPLETE, "bash", str(script), "jaxfed", *words]
        done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=tmp_path)
        return set(done.stdout.split())

    assert offered("") == set(COMMANDS)
    assert offered("fit", "per") == {"perpca"}
    assert offered("fit", "perpca", "--shared") == {"--shared-rank"}
    assert offered("fit", "perpca", "--variant", "") == {"tangent", "polar"}
    assert "--config" in offered("sweep", "hierarchical", "--co")
    (tmp_path / "data.npy").touch()
    assert "data.npy" in offered("fit", "perpca", "--data", "dat")


def test_without_shtab_one_is_told_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "jaxfed[cli]" in refused(capsys, ["completion", "bash"])


# --- help and tables -------------------------------------------------------------------------


def leaves(parser, name=()):
    below = commands_of(parser)
    if below is None:
        return {name: parser}
    found = {}
    for word, each in below.items():
        found |= leaves(each, (*name, word))
    return found


@pytest.fixture(scope="module")
def whole():
    return parser_of(COMMANDS)


def test_commands_are_summed_up_in_the_same_words_everywhere(whole):
    (nested,) = [x for x in whole._actions if isinstance(x, argparse._SubParsersAction)]
    assert {each.dest: each.help for each in nested._choices_actions} == COMMANDS


def test_every_exported_algorithm_has_a_command(whole):
    exported = {
        found
        for family in (jf.pca, jf.gcca, jf.generative)
        for found in vars(family).values()
        if isinstance(found, type) and issubclass(found, jf.Algorithm)
    }
    # Any model by any loss: there is no file that either could come from.
    exported.remove(jf.generative.AdaptiveTraining)
    assert exported == {made for each in algorithms.values() for made in each}
    assert set(commands_of(commands_of(whole)["fit"])) == set(algorithms)


def test_settings_of_views_are_those_of_their_classes(whole):
    fits = commands_of(commands_of(whole)["fit"])
    for name, made in (("gcca", jf.gcca.MaxVar), ("mvlsa", jf.gcca.MVLSA)):
        known = {action.dest: action for action in fits[name]._actions}
        for setting, parameter in inspect.signature(made).parameters.items():
            assert descriptions(made)[setting].split()[0].strip("`") in known[setting].help
            if parameter.default is not inspect.Parameter.empty:
                assert known[setting].default == parameter.default


def test_every_command_and_every_option_says_what_it_is(whole):
    silent = []
    for name, parser in leaves(whole).items():
        if not parser.description:
            silent.append(" ".join(name))
        for action in parser._actions:
            text = action.help or ""
            # A default alone says nothing.
            if not re.sub(r"^default: .*", "", text).strip():
                option = (*action.option_strings, action.dest)[0]
                silent.append(" ".join((*name, option)))
    assert not silent, "\n".join(silent)


def test_a_terminal_gets_a_table_by_rich_and_a_pipe_plain_text(monkeypatch):
    pytest.importorskip("rich")
    rows = [{"client": "[red]a[/red]", "share (%)": 12.5}, {"client": "b", "share (%)": None}]

    def printed(terminal):
        file = io.StringIO()
        file.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stdout", file)
        _report.show(rows)
        return file.getvalue()

    assert printed(False) == _report.table(rows) + "\n"
    drawn = printed(True)
    assert "─" in drawn and "[red]a[/red]" in drawn and re.search(r"12\.5", drawn)
    monkeypatch.setattr(_report, "find_spec", lambda name: None)
    assert printed(True) == _report.table(rows) + "\n"


def test_help_is_there_at_once():
    """The processor's time; nothing that is heavy is imported."""
    command = "import sys, jaxfed.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    command += "import os; print(sum(os.times()[:2]), 'jax' in sys.modules, 'rich' in sys.modules)"
    times = []
    for _ in range(3):
        run = subprocess.run(
            [sys.executable, "-c", command], capture_output=True, text=True, env=dict(os.environ)
        )
        seconds, *heavy = run.stdout.split()[-3:]
        assert heavy == ["False", "False"]
        times.append(float(seconds))
    assert min(times) < 0.5
