"""The papers' tables and figures: what each shows, and which targets are about it.

Drawings that show no result are left out: Figure 2 and Table 1 of Shi & Kontar, Figures 1 and 2 of
Shrestha & Fu, and Figure 1 of ADEPT.
"""

from typing import Literal, NamedTuple

PERPCA, HIERARCHICAL = "Shi & Kontar (2024), PerPCA", "Ozkara, Huang & Diggavi (2023)"
ADEPT, GCCA = "Ozkara, Huang, Zhou & Diggavi, ADEPT", "Shrestha & Fu (2023), CuteMaxVar"
FAPS = "Wang, Liu & Zhang (2022), FAPS"


class Item(NamedTuple):
    """A table or figure.

    Attributes:
        paper: whose.
        name: as it is called there.
        shows: what it is about.
        covered: `"whole"`, `"part"`, or `"not"` at all.
        targets: what is run for it.
        why: what is missing, or stands in for the paper's data.
    """

    paper: str
    name: str
    shows: str
    covered: Literal["whole", "part", "not"]
    targets: tuple[str, ...]
    why: str = ""


_SCALED = "at a smaller size, said in the target's notes"
_RECORDS = (
    "six views of digits stand in for the health records of the CMS, which the paper's programs do "
    "not make from the public files"
)

ITEMS = (
    Item(PERPCA, "Figure 1", "Two clients, pooled and personalized PCA", "whole",
         ("perpca/figure1",)),
    Item(PERPCA, "Figure 3", "Convergence and misalignment", "whole",
         ("perpca/figure3", "perpca/steps")),
    Item(PERPCA, "Figure 4", "Subspace error and samples", "whole", ("perpca/figure4",)),
    Item(PERPCA, "Figure 5", "Subspace error and dimension", "whole", ("perpca/figure5",)),
    Item(PERPCA, "Figure 6", "Subspace error and clients", "whole", ("perpca/figure6",)),
    Item(PERPCA, "Table 2", "Test error of sparse and rich clients", "whole", ("perpca/table2",)),
    Item(PERPCA, "Figure 7", "Too many local components", "whole", ("perpca/figure7",)),
    Item(PERPCA, "Figure 8", "Too many shared components", "whole", ("perpca/figure8",)),
    Item(PERPCA, "Table 3", "Misalignment of such fits", "whole", ("perpca/table3",)),
    Item(PERPCA, "Figure 9", "Clustering of clients", "whole", ("perpca/figure9",)),
    Item(PERPCA, "Table 4", "Icons on textures, beside robust PCA", "part", ("perpca/table4",),
         "the paper's four pictures are not published; icons and texture are drawn anew"),
    Item(PERPCA, "Table 5", "Errors on FEMNIST and CIFAR-10", "part", ("perpca/mnist",),
         "MNIST stands in for both"),
    Item(PERPCA, "Table 6", "Moving cars of a video", "part", ("perpca/thermal",),
         "a thermal camera's frames stand in for the video"),
    Item(PERPCA, "Table 7", "Topics of presidential debates", "part", ("perpca/debates",),
         "other transcripts"),
    Item(PERPCA, "Figure 10", "Error of the shared component and eigengap", "whole",
         ("perpca/figure10",)),
    Item(PERPCA, "Figure 11", "Error of the shared component and misalignment", "whole",
         ("perpca/figure11",)),
    Item(HIERARCHICAL, "Figure 1(a)", "Error by rounds", "whole", ("hierarchical/figure1a",)),
    Item(HIERARCHICAL, "Figure 1(b)", "Error by heterogeneity", "whole",
         ("hierarchical/figure1b",)),
    Item(HIERARCHICAL, "Figure 1(c)", "Error by samples", "whole", ("hierarchical/figure1c",)),
    Item(HIERARCHICAL, "Figure 1(d)", "Error by clients", "whole", ("hierarchical/figure1d",)),
    Item(HIERARCHICAL, "Figure 2", "Convergence by the prior variance", "whole",
         ("hierarchical/figure2",)),
    Item(ADEPT, "Table 1", "Autoencoders of synthetic clients", "part", ("adept/table1",),
         "the order of the methods: the numbers are lost in the copy at hand"),
    Item(ADEPT, "Table 2", "Autoencoders of one-class clients", "part", ("adept/table2",),
         "the order of the methods, on MNIST's test images alone"),
    Item(ADEPT, "Table 3", "KID and FID of diffusion models", "part", ("adept/table3",),
         "the order of the methods, a five-thousandth of the published training"),
    Item(ADEPT, "Figure 2", "PCA with a learned variance", "whole", ("adept/figure2",)),
    Item(ADEPT, "Figure 3", "KID client by client", "part", ("adept/figure3",),
         "as Table 3"),
    Item(ADEPT, "Figure 4", "Generated images and their noise", "part", ("adept/figure4",),
         "as Table 3"),
    Item(GCCA, "Table I", "Compression ratios", "whole", ("gcca/table1",)),
    Item(GCCA, "Figure 3", "Warm and random starts", "whole", ("gcca/figure3",)),
    Item(GCCA, "Figure 4", "Cost by bits", "whole", ("gcca/figure4",)),
    Item(GCCA, "Figure 5", "Rounds to multiples of the least cost", "whole", ("gcca/table1",)),
    Item(GCCA, "Figure 6", "Batch sizes", "whole", ("gcca/figure6",)),
    Item(GCCA, "Figure 7", "Numbers of views", "whole", ("gcca/figure7",)),
    Item(GCCA, "Figure 8", "Large sparse views", "part", ("gcca/figure8",), _SCALED),
    Item(GCCA, "Figure 9", "Sentences in three languages", "part",
         ("gcca/figure9", "gcca/digits"),
         "six views of digits stand in for Europarl's sentences, whose features are not published"),
    Item(GCCA, "Figure 10", "Spectral clustering of deep representations", "whole",
         ("gcca/figure10",)),
    Item(GCCA, "Figure 11", "Classification by deep representations", "whole",
         ("gcca/figure11",)),
    Item(GCCA, "Figure 12", "Health records, embedded", "part", ("gcca/deep_digits",),
         _RECORDS),
    Item(GCCA, "Figure 13", "Health records, classified", "part", ("gcca/deep_digits",),
         _RECORDS),
    Item(FAPS, "Table 1", "Rounds of subspace iteration and FAPS", "part", ("faps/table1",),
         "FAPS at fewer features; its printed number is not legible in the copy at hand"),
    Item(FAPS, "Figure 1", "What messages give away", "part", ("faps/figure1",),
         "(a) as large as printed, (b) at a tenth of it"),
    Item(FAPS, "Figure 2", "Rounds on synthetic problems", "part", ("faps/figure2",), _SCALED),
    Item(FAPS, "Table 2", "Errors on synthetic problems", "part", ("faps/table2",), _SCALED),
    Item(FAPS, "Figure 3", "Rounds on images", "part", ("faps/figure3",),
         "MNIST's test images, of four data sets"),
    Item(FAPS, "Table 3", "Errors on images", "part", ("faps/table3",),
         "MNIST's test images, and printed are means over four data sets"),
    Item(FAPS, "Figure 4", "Convergence on arithmetic spectra", "part", ("faps/figure4",),
         _SCALED),
    Item(FAPS, "Table 4", "Clients of uneven size", "whole", ("faps/table4", "faps/steps")),
)  # fmt: skip
