"""Data of cases of verify_chain and verify_tree that have only one right answer."""

import math

from fastspec_kernels.testing.edges import ChainEdge, TreeEdge

OFF = -math.inf
NAN = math.nan
LAST = 1 - 2.0**-24  # the largest float32 below 1
GREEDY = {"temperature": 0.0}
ZERO, ONE, TWO = (0.0, OFF, OFF), (OFF, 0.0, OFF), (OFF, OFF, 0.0)  # point masses
HALVES = (0.0, 0.0, OFF)
FLAT = (0.0, 0.0, 0.0)

CHAIN_EDGES = (
    ChainEdge(
        "a uniform number of 0 accepts a token of probability 0",
        *(((0.0, OFF, 1.0), ONE), ((0.0, 5.0, 0.0),), (1,), (0.0, 0.0), (0, -1), 0),
    ),
    ChainEdge(
        "a certain proposal of probability 0 is accepted, or drawn again",
        *(((0.0, OFF, 1.0), ONE), None, (1,), (0.0, LAST), (2, -1), 0),
    ),
    ChainEdge(
        "a token just as likely in both models is rejected",
        *(((0.0, 1.0, 2.0), ONE), ((0.0, 1.0, 2.0),), (0,), (LAST, 0.5), (0, 1), 1),
    ),
    ChainEdge(
        "nothing in the residual, so something else than the target is drawn from",
        *((ZERO, ONE), (ZERO,), (1,), (0.5, 0.5), (0, -1), 0),
    ),
    ChainEdge(
        "a token that only the draft has is emitted",
        *(((0.0, 1.0, OFF), FLAT), (TWO,), (2,), (0.0, LAST), (1, -1), 0),
    ),
    ChainEdge(
        "a token that the draft gives probability 0 and the target has is rejected",
        *((ZERO, ZERO), (ONE,), (0,), (LAST, 0.0), (0, 0), 1),
    ),
    ChainEdge(
        "the rejected token is drawn again, its share of the target not taken away",
        *((HALVES, FLAT), None, (0,), (LAST, 0.0), (1, -1), 0),
    ),
    ChainEdge(
        "the share of the draft is not taken away from the target",
        *((HALVES, FLAT), (ZERO,), (0,), (0.75, 0.25), (1, -1), 0),
    ),
    ChainEdge(
        "the comparison is the wrong way round",
        *((ZERO, ONE), (FLAT,), (0,), (0.9, 0.0), (0, 1), 1),
    ),
    ChainEdge(
        "the number that rejected is used again for the extra token",
        *((FLAT, FLAT), (TWO,), (2,), (0.9, 0.1), (0, -1), 0),
    ),
    ChainEdge(
        "a proposal after a rejection is looked at",
        *((ZERO, ONE, TWO), (ZERO, ONE), (1, 1), (0.0, 0.0, 0.0), (0, -1, -1), 0),
    ),
    ChainEdge(
        "the bonus token does not come from the row after the last proposal",
        *((ZERO, ONE, TWO), (ZERO, ONE), (0, 1), (0.5, 0.5, 0.5), (0, 1, 2), 2),
    ),
    ChainEdge(
        "a vocabulary of one token", ((3.0,), (-3.0,)), ((0.0,),), (0,), (LAST, 0), (0, 0), 1
    ),
    ChainEdge(
        "no proposals",
        *(((0.0, 3.0, 1.0),), None, (), (0.9999,), (1,), 0, GREEDY),
    ),
    ChainEdge(
        "a greedy sequence reads the draft's row or the uniform numbers",
        *(((2.0, 2.0), (1.0, 2.0)), ((NAN, 0.0),), (0,), (LAST, 0.0), (0, 1), 1, GREEDY),
    ),
    ChainEdge(
        "of two best tokens the lowest is not taken by a greedy sequence",
        *(((2.0, 2.0), (1.0, 2.0)), None, (1,), (0.0, 0.0), (0, -1), 0, GREEDY),
    ),
    ChainEdge(
        "padding is taken for a proposal",
        *(((9.0, OFF), (OFF, 9.0)), None, (-1,), (0.0, 0.0), (0, -1), 0),
    ),
    ChainEdge(
        "an id outside the vocabulary is accepted or read",
        *(((9.0, OFF), (OFF, 9.0)), None, (2**31 - 1,), (0.0, 0.0), (0, -1), 0),
    ),
    ChainEdge(
        "top-k of the target leaves a proposal some probability",
        *(((0.0, 3.0, 1.0), ONE), ((3.0, 0.0, 0.0),), (0,), (0.0, 0.0)),
        *((1, -1), 0, {"top_k": 1}),
    ),
    ChainEdge(
        "a row with NaN gives tokens",
        *(((NAN, 0.0), (0.0, 0.0)), None, (1,), (0.5, 0.5), (-1, -1), -1),
    ),
    ChainEdge(
        "a row behind a rejection is judged",
        *((ONE, (NAN, 0.0, 0.0), ZERO), None, (0, 1), (0.5, 0.5, 0.5), (1, -1, -1), 0),
    ),
    ChainEdge(
        "a draft row behind a rejection is judged",
        *((ONE, ZERO, ZERO), (ZERO, (NAN, 0.0, 0.0)), (0, 0), (0.5, 0.5, 0.5), (1, -1, -1), 0),
    ),
    ChainEdge(
        "a row without any possible token gives tokens",
        *(((0.0, 0.0), (OFF, OFF)), None, (1,), (0.0, 0.5), (-1, -1), -1),
    ),
)

TREE_EDGES = (
    TreeEdge(
        "a tree without children", "target_only", (ONE,), None, (7,), (-1,), (0.0, 0.5), (), (1,)
    ),
    TreeEdge(
        "a uniform number of 0 accepts a child of probability 0",
        *("target_only", (ONE, ZERO, TWO), None, (0, 0, 1), (-1, 0, 0), (0.0, 0, 0, 0.5)),
        *((2,), (1, 2)),
    ),
    TreeEdge(
        "a sibling with the same token counts again",
        *("target_only", (HALVES, FLAT, FLAT), None, (0, 0, 0), (-1, 0, 0), (0.75, 0, 0, 0.0)),
        *((), (1,)),
    ),
    TreeEdge(
        "the tokens of rejected children are drawn again",
        *("target_only", (FLAT, FLAT, FLAT), None, (0, 2, 0), (-1, 0, 0), (0.9, 0, 0, LAST)),
        *((), (1,)),
    ),
    TreeEdge(
        "the second child is not tried, or another row than the last node's gives the bonus",
        *("target_only", (HALVES, ONE, TWO), None, (0, 0, 1), (-1, 0, 0), (0.75, 0, 0, 0.5)),
        *((2,), (1, 2)),
    ),
    TreeEdge(
        "padding is taken for a child",
        *("target_only", (ZERO, ONE, ONE), None, (0, 0, 0), (-1, -1, 1), (0.0, 0, 0, 0.5)),
        *((), (0,)),
    ),
    TreeEdge(
        "an id outside the vocabulary is accepted or read",
        *("target_only", (ZERO, ONE, TWO), None, (0, 2**31 - 1, -5), (-1, 0, 0), (0.0, 0, 0, 0.0)),
        *((), (0,)),
    ),
    TreeEdge(
        "without replacement: the rejected token's share of the draft is not passed on",
        *("without_replacement", (ZERO, FLAT, ONE), (HALVES, FLAT, FLAT), (0, 1, 0), (-1, 0, 0)),
        *((0.0, 0.0, LAST, 0.5), (2,), (0, 1)),
    ),
    TreeEdge(
        "without replacement: a draft of probability 1 leaves nothing, but it is divided by 0",
        *("without_replacement", (ZERO, FLAT, ONE), (ONE, FLAT, FLAT), (0, 1, 0), (-1, 0, 0)),
        *((0.0, 0.0, LAST, 0.5), (2,), (0, 1)),
    ),
    TreeEdge(
        "with replacement: a token that was rejected once is accepted when it comes again",
        *("with_replacement", (HALVES, FLAT, FLAT, TWO), (ONE, FLAT, FLAT, FLAT)),
        *((0, 1, 1, 0), (-1, 0, 0, 0), (0.0, 0.75, 0.0, LAST, 0.5), (3,), (0, 2)),
    ),
    *(
        TreeEdge(
            f"{rule}: equal models leave nothing, so something else than the target is drawn from",
            *(rule, (FLAT, FLAT), (FLAT, FLAT), (0, 99), (-1, 0), (0.0, 0.5, 0.5), (), (1,)),
        )
        for rule in ("without_replacement", "with_replacement")
    ),
    TreeEdge(
        "a child just as likely in both models is rejected",
        *("with_replacement", (FLAT, ONE), (FLAT, FLAT), (0, 1), (-1, 0), (0.0, LAST, 0.5)),
        *((1,), (1, 1)),
    ),
    TreeEdge(
        "a greedy sequence reads the draft's row or the uniform numbers",
        *("with_replacement", ((2.0, 2.0), (1.0, 2.0), FLAT[:2]), ((NAN, 0.0),) * 3),
        *((0, 1, 0), (-1, 0, 0), (0.0, 0.0, LAST, 0.0), (2,), (0, 0), GREEDY),
    ),
    TreeEdge(
        "a row with NaN gives tokens",
        *("target_only", ((NAN, 0.0), HALVES[:2]), None, (0, 1), (-1, 0), (0.5, 0.5, 0.5)),
        *((), ()),
    ),
    TreeEdge(
        "a row that the walk does not come by is judged",
        *("target_only", (ZERO, (NAN, 0.0, 0.0)), None, (0, 1), (-1, 0), (0.5, 0.5, 0.5)),
        *((), (0,)),
    ),
)
