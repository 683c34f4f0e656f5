"""`jaxfed deploy`: the app it writes, and what it does before and after Flower runs."""

import sys
import tomllib

import numpy as np
import pytest

import jaxfed as jf
from jaxfed.cli import deploy, main
from jaxfed.deploy.store import states
from tests.cli.command_line import refused


def test_deploy_writes_an_app_that_flower_takes(tmp_path, capsys):
    flwr = pytest.importorskip("flwr.supercore.object_ref")
    app = tmp_path / "app"
    settings = ["--set", "shared_rank=2", "local_rank=1", "solver=gradient", "variant=polar"]
    command = ["deploy", "new", str(app), "--algorithm", "PerPCA"]
    assert main([*command, *settings, "--rounds", "7"]) == 0
    assert "federation/app.py" in capsys.readouterr().out
    for component in ("app:server", "app:client", "client:client"):
        assert flwr.validate(f"federation.{component}", project_dir=app)[0]
    names = {}
    exec((app / "federation" / "app.py").read_text(), names)
    made = names["make_algorithm"]({})
    assert made.shared_rank == 2 and made.variant == "polar"
    np.save(tmp_path / "own.npy", np.ones((4, 6), np.float32))
    assert len(names["make_data"]({"data": str(tmp_path / "own.npy")})) == 1
    assert repr(names["channel"]) == repr(jf.channel.lossless())
    assert "empty" in refused(capsys, main([*command, *settings]))
    command[2] = str(tmp_path / "other")
    assert "local_rank=VALUE" in refused(capsys, main([*command, "--set", "shared_rank=2"]))
    assert "one of" in refused(capsys, main([*command, "--set", "rank=2"]))
    command[-1] = "kmeans"
    assert "algorithm: wanted one of" in refused(capsys, main(command))
    trial = ["deploy", "try", "--app", str(app), "--data", str(tmp_path)]
    assert "for each of 3 nodes, got 1" in refused(capsys, main(trial))


def test_deploy_writes_masks_into_an_app(tmp_path, capsys):
    pytest.importorskip("flwr")
    command = ["deploy", "new", str(tmp_path / "app"), "--algorithm", "subspaceiteration"]
    command += ["--set", "rank=2", "--nodes", "4", "--masks"]
    assert "bound: wanted" in refused(capsys, main([*command, "-1"]))
    assert not (tmp_path / "app").exists()
    assert main([*command, "2.5"]) == 0
    names = {}
    exec((tmp_path / "app" / "federation" / "app.py").read_text(), names)
    wanted = jf.Wire(jf.channel.secure_sum(4, bits=32, bound=2.5), jf.channel.lossless())
    assert repr(names["channel"]) == repr(wanted)


def test_deploy_writes_noise_that_sites_share(tmp_path, capsys):
    pytest.importorskip("flwr")
    command = ["deploy", "new", str(tmp_path / "app"), "--nodes", "4", "--algorithm"]
    pooled, perpca = ["pooled", "--set", "rank=2"], ["perpca", "--set", "shared_rank=1"]
    masks, noise, three = ["--masks", "900"], ["--epsilon", "1"], ["--sharers", "3"]
    for given in (
        [*pooled, *masks, *three],
        [*pooled, *noise, *three],
        [*perpca, "local_rank=1", *masks, *noise, *three],
        [*pooled, *masks, *noise, "--sharers", "5"],
    ):
        assert "sharers: wanted" in refused(capsys, main([*command, *given]))
    assert main([*command, *pooled, *masks, *noise, *three]) == 0
    text = (tmp_path / "app" / "federation" / "app.py").read_text()
    assert "epsilon=1.0, delta=1e-05, sharers=3)" in text
    assert "rounds=1," in text  # there is one exchange


@pytest.mark.parametrize(
    ("option", "name"), [("--seed", "key"), ("--nodes", "clients"), ("--rounds", "rounds")]
)
def test_deploy_writes_no_app_that_cannot_start(tmp_path, capsys, option, name):
    command = ["deploy", "new", str(tmp_path / "app"), "--algorithm", "pooled", "--set", "rank=1"]
    for value in ("-1", str(2**32)) if option == "--seed" else ("0", "-1"):
        assert f"{name}: wanted " in refused(capsys, main([*command, option, value]))
    assert not (tmp_path / "app").exists()


def test_a_trial_shows_why_nodes_did_not_answer(tmp_path):
    local = pytest.importorskip("jaxfed.deploy.local")
    made = local.LocalFederation(tmp_path, [{}, {}])
    made.nodes = {0: None, 1: None}
    made.log("node-0").write_text("INFO: x\n")
    made.log("node-1").write_text("WARNING: no answer: first\nx\nWARNING: no answer: second\n")
    assert made._reasons() == ["no answer: second"]


def test_any_path_reaches_flower(tmp_path):
    """Quotes, spaces, and what JSON writes as two characters."""
    local = pytest.importorskip("jaxfed.deploy.local")
    flwr = pytest.importorskip("flwr.common.config")
    path = "/a 'b' \"c\" = \\d \N{PILE OF POO} \u00e9\t\x7f/x.npy"
    config = {"data": path, "partition-id": 3, "worker": False, "share": 0.5}
    made = local.LocalFederation(tmp_path, [config])
    for name in ("node-0", "run"):
        assert flwr.parse_config_args([made._toml(name, config)]) == config


def test_sites_are_files_or_folders_of_files(tmp_path):
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    for name, parts in {"site10": [rows], "site2": [rows[:1], rows[1:]], "empty": []}.items():
        (tmp_path / name).mkdir()
        for number, part in enumerate(parts):
            np.savetxt(tmp_path / name / f"{number}.csv", part, delimiter=",")
    (tmp_path / "notes.txt").touch()
    assert [path.name for path in deploy._sites(tmp_path)] == ["site2", "site10"]
    names = {}
    main(["deploy", "new", str(tmp_path / "app"), "--algorithm", "pooled", "--set", "rank=1"])
    exec((tmp_path / "app" / "federation" / "app.py").read_text(), names)
    for site in deploy._sites(tmp_path):
        clients = names["make_data"]({"data": str(site)})
        np.testing.assert_array_equal(clients.data.values, rows[None])
    np.save(tmp_path / "site1.npy", rows)
    (tmp_path / "site3.csv").write_text("age,weight\n1,2\n")
    assert [path.name for path in deploy._sites(tmp_path)] == ["site1.npy", "site3.csv"]
    assert names["make_data"]({"data": str(tmp_path / "site3.csv")}).names.features == (
        "age",
        "weight",
    )


def test_a_trial_shows_the_objective_and_the_time_that_is_left(tmp_path, capsys, monkeypatch):
    store, times = states(tmp_path), iter([5.0, 7.0, 13.0, 15.0])
    monkeypatch.setattr(deploy.time, "monotonic", lambda: next(times))
    show = deploy._Rounds(tmp_path)
    show()
    for done, objective in ((0, []), (1, [0.5]), (3, [0.5, 0.4, 0.25]), (4, [0.5] * 3 + [np.nan])):
        arrays = {"history objective": np.asarray(objective)} if done else {}
        store.save(done, {"run": {"rounds": 4}}, arrays)
        show()
        show()
    assert capsys.readouterr().out.splitlines() == [
        "first messages",
        "round 1 of 4, objective 0.5, 2.0 s a round, about 6 s left",
        "round 3 of 4, objective 0.25, 2.7 s a round, about 3 s left",
        "round 4 of 4, 2.5 s a round",
    ]


def test_a_trial_says_what_nodes_warn_of(tmp_path):
    units, clipped = "clients: wanted features of similar size", "masks: client 0 clipped {} of 2"
    said = {
        "node-0": [clipped.format(1), units, clipped.format(2)],
        "node-1": [units],
        "node-2": [],
    }
    for node, lines in said.items():
        text = "".join(f"jaxfed: {line}\nINFO: x\n" for line in lines)
        (tmp_path / f"{node}.log").write_text(text)
    found = deploy._warnings([tmp_path / f"{node}.log" for node in said])
    assert found == {clipped.format(2): ["node-0"], units: ["node-0", "node-1"]}


@pytest.fixture
def app(tmp_path, capsys, monkeypatch):
    """An app folder, data for one node, and the command that tries it as far as Flower."""
    local = pytest.importorskip("jaxfed.deploy.local")

    def start(*arguments):
        raise ValueError("Flower starts")

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] == "federation"]:
            del sys.modules[name]

    monkeypatch.setattr(local, "LocalFederation", start)
    folder = tmp_path / "app"
    main(["deploy", "new", str(folder), "--algorithm", "pooled", "--set", "rank=2"])
    np.save(tmp_path / "own.npy", np.ones((4, 6), np.float32))
    capsys.readouterr()
    path = list(sys.path)

    def trial():
        code = main(
            ["deploy", "try", "--app", str(folder), "--data", str(tmp_path), "--nodes", "1"]
        )
        forget()
        assert sys.path == path
        return code, capsys.readouterr().err

    forget()
    return folder, trial


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        (
            "federation/app.py",
            "jf.channel.lossless()",
            "jf.channel.no_such()",
            "AttributeError: module 'jaxfed.channel' has no attribute 'no_such'",
        ),
        ("federation/app.py", "import jaxfed", "import nowhere", "No module named 'nowhere'"),
        ("federation/app.py", "server =", "service =", "no attribute 'server'"),
        ("federation/app.py", "client =", "patron =", "no attribute 'client'"),
        ("federation/app.py", "def ", "deaf ", "SyntaxError: invalid syntax"),
        ("pyproject.toml", "serverapp =", "serverap =", "KeyError: 'serverapp'"),
        ("pyproject.toml", "[tool.flwr.app.components]", "[components]", "KeyError: 'components'"),
    ],
    ids=("argument", "module", "server", "client", "syntax", "component", "table"),
)
def test_deploy_imports_an_app_before_it_starts_flower(app, file, old, new, words):
    folder, trial = app
    path = folder / file
    path.write_text(path.read_text().replace(old, new))
    code, said = trial()
    assert code == 2 and f"app: wanted one that can be imported, got {folder}" in said
    assert words in said and "Flower starts" not in said


def test_deploy_starts_flower_for_an_app_that_can_be_imported(app):
    code, said = app[1]()
    assert code == 2 and "Flower starts" in said


def test_an_app_holds_no_path_of_the_machine_that_wrote_it(tmp_path, app, monkeypatch):
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    assert main(["deploy", "new", ".", "--algorithm", "pooled", "--set", "rank=2"]) == 0
    for folder in (app[0], tmp_path / "new"):
        for path in (folder / "pyproject.toml", folder / "federation" / "app.py"):
            assert str(tmp_path) not in path.read_text()
        with (folder / "pyproject.toml").open("rb") as file:
            out = tomllib.load(file)["tool"]["flwr"]["app"]["config"]["out"]
        assert out == f"{folder.name}/out"
