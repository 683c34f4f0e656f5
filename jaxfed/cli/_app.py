"""The commands, and the options that all of them have."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.config import Toml

from jaxfed import __version__
from jaxfed.cli._options import paragraphs

# Here, so that `jaxfed --help` need not import the commands, and with them JAX.
COMMANDS = {
    "fit": """fit an algorithm to your own files

        Fit an algorithm to your own files, one for each client or for each view, and write results,
        pictures and a table to a folder. jaxfed fit ALGORITHM --help lists the options of an
        algorithm. perpca is a good first choice; compare it with local and pooled.""",
    "info": """show what a result holds

        Print which algorithm ran, how it ended, what it communicated and what it found.""",
    "transform": """compute scores of samples in the components of an earlier fit

        Compute the scores of samples in the components of their client, and their squared distances
        from the span of these components. result.npz holds the names of the clients, and for each
        sample client, scores and anomaly; for tables, scores.csv has the same.""",
    "personalize": """learn local components of new clients, given shared ones from an earlier fit

        Learn local components for clients that took no part in the fit, each from its own samples.
        The shared components do not change, and nothing is sent. RESULT is the output of jaxfed fit
        perpca, oneshot or a method with shared components only. Pass the new result to jaxfed info
        or jaxfed transform.""",
    "sweep": """compare settings, numbers of samples and of clients, and seeds on a grid

        The same command resumes an interrupted sweep. For algorithms without a command here, write
        a function for jf.grid in Python.""",
    "plan": """predict memory and messages of a run on TPUs or GPUs without renting them

        Compile a run for machines you need not have, and print its memory and messages, and whether
        it fits, or in blocks of how many clients it would. Nothing is run. jaxfed plan privacy
        predicts the error of shared components under a guarantee for persons.""",
    "deploy": """run on separate machines with Flower

        Write an app folder for Flower, try it on this machine, and start or
        end a node's worker.""",
    "demo": """learn shared and local components of handwritten digits, in under a minute

        Split scikit-learn's 1,797 images of handwritten digits over 50 clients with one or two
        digits each, fit shared and local components, compare them with PCA of each client alone, of
        all data pooled, and in one shot, and draw what was learned.""",
    "reproduce": """reproduce a table or figure of a paper

        Print what was computed beside the published numbers; all runs all of them.""",
    "completion": """print a script for shell completion of commands and options

        Save it where the shell looks for such scripts. bash:
        ~/.local/share/bash-completion/completions/jaxfed; zsh: a folder of $fpath, as _jaxfed;
        fish: ~/.config/fish/completions/jaxfed.fish.""",
}

app = App(
    "jaxfed",
    help="Federated, personalized, unsupervised learning in JAX. Start with jaxfed demo. "
    "jaxfed fit --help lists the algorithms.",
    help_format="plaintext",
    version=__version__,
    default_parameter=Parameter(
        negative_iterable="", consume_multiple=(1, None), allow_repeating=True
    ),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
for number, (name, about) in enumerate(COMMANDS.items()):
    place = f"jaxfed.cli.{name}:command"
    app.command(place, name=name, help=paragraphs(about), sort_key=number)
app.meta.group_parameters = Group("Everywhere", sort_key=100)
app.meta.suppress_keyboard_interrupt = False


@app.meta.default
def _launch(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[
        Path | None,
        Parameter(
            metavar="FILE",
            help="TOML file with further options, by their names without --, such as rounds = 100; "
            "options on the command line take precedence",
        ),
    ] = None,
    no_compilation_cache: Annotated[
        bool,
        Parameter(
            help="do not keep compiled programs on disk (in ~/.cache/jaxfed, or XDG_CACHE_HOME)",
            negative="",
            show_default=False,
        ),
    ] = False,
) -> bool | None:
    if config is not None:
        source = Toml(config, must_exist=True, use_commands_as_keys=False)
        for name in source.config.keys() & {*COMMANDS, "config", "no-compilation-cache"}:
            # Which cyclopts would pass over.
            raise ValueError(f"--config: {config} has {name!r}, wanted options of the command")
        app.config = source
    function, bound, _ = app.parse_args(words, print_error=False, exit_on_error=False)
    if not no_compilation_cache and function.__module__.startswith("jaxfed."):
        from jaxfed.core.run.compiling import enable_compilation_cache

        # Without a home folder or disk space, programs are compiled anew each time.
        with suppress(OSError, RuntimeError):
            enable_compilation_cache()
    return function(*bound.args, **bound.kwargs)


def run(words: Sequence[str]) -> bool | None:
    """Run a command.

    Returns:
        True if it wrote results of a run that did not converge.

    Raises:
        ValueError: if the words are not those of a command and its options.
    """
    app.config = ()  # of an earlier call in this process
    try:
        return app.meta(words, print_error=False, exit_on_error=False, result_action="return_value")
    except CycloptsError as error:
        raise ValueError(str(error)) from error
