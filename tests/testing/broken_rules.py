"""Acceptance rules with the bugs that have been published, for the losslessness kit to catch."""

from fastspec_kernels.testing.rules import (
    inverse_cdf,
    normalised,
    positive_part,
    residual,
    weight,
    without,
)


def chain_of(decide):
    """A rule for chains from one for a position, which gives a token and whether it goes on."""

    def rule(target, draft, proposals, uniforms):
        emitted = ()
        for i, token in enumerate(proposals):
            token, accepted = decide(target[i], draft[i], token, uniforms[i], uniforms[-1])
            emitted = (*emitted, token)
            if not accepted:
                return emitted
        return (*emitted, inverse_cdf(target[len(proposals)], uniforms[-1]))

    return rule


@chain_of
def without_subtraction(target, draft, token, decision, extra):
    """Draws the token after a rejection from the target itself."""
    if decision * weight(draft, token) < weight(target, token):
        return token, True
    return inverse_cdf(target, extra), False


@chain_of
def models_swapped(target, draft, token, decision, extra):
    """Compares the wrong way round."""
    if decision * weight(target, token) < weight(draft, token):
        return token, True
    return inverse_cdf(residual(target, draft), extra), False


@chain_of
def shared_uniform(target, draft, token, decision, extra):
    """Uses the number of the decision again for the extra token."""
    if decision * weight(draft, token) < weight(target, token):
        return token, True
    return inverse_cdf(residual(target, draft), decision), False


@chain_of
def not_strict(target, draft, token, decision, extra):
    """Accepts on equality, so a number of 0 accepts a token of probability 0."""
    if decision * weight(draft, token) <= weight(target, token):
        return token, True
    return inverse_cdf(residual(target, draft), extra), False


@chain_of
def drawn_again(target, draft, token, decision, extra):
    """For certain drafts: matches a sample of the target, but emits another one on a mismatch."""
    if inverse_cdf(target, decision) == token:
        return token, True
    return inverse_cdf(target, extra), False


@chain_of
def always_accepted(target, draft, token, decision, extra):
    """Accepts whatever the target can emit at all."""
    if weight(target, token) > 0:
        return token, True
    return inverse_cdf(residual(target, draft), extra), False


def one_number_for_all(target, draft, proposals, uniforms):
    """Decides every position by the same number, as a generator seeded anew at each does."""
    for i, token in enumerate(proposals):
        if not uniforms[0] * weight(draft[i], token) < weight(target[i], token):
            return (*proposals[:i], inverse_cdf(residual(target[i], draft[i]), uniforms[-1]))
    return (*proposals, inverse_cdf(target[len(proposals)], uniforms[-1]))


def bonus_of_the_last_row(target, draft, proposals, uniforms):
    """Takes the token after an accepted chain from the row that judged the last proposal."""
    for i, token in enumerate(proposals):
        if not uniforms[i] * weight(draft[i], token) < weight(target[i], token):
            return (*proposals[:i], inverse_cdf(residual(target[i], draft[i]), uniforms[-1]))
    return (*proposals, inverse_cdf(target[max(len(proposals) - 1, 0)], uniforms[-1]))


def block_of(stops_early=False, plain_residual=False, inclusive=False):
    """Block verification, and ways to get it wrong that were shipped."""

    def rule(target, draft, proposals, uniforms):
        num, scale, scales, accepted = len(proposals), 1, [1], 0
        for i, token in enumerate(proposals):
            joint, share = scale * weight(target[i], token), weight(draft[i], token)
            scale = min(1, 0 if joint == 0 else 1 if share == 0 else joint / share)
            scales.append(scale)
        for length in range(1, num + 1):
            scale = scales[length]
            rest, whole = scale, 1
            if length < num:
                rest = sum(positive_part(target[length], draft[length], scale))
                whole = rest + 1 - scale
            coin = uniforms[length - 1] * whole
            if whole == 0 or coin < rest or (inclusive and coin <= rest):
                accepted = length
            elif stops_early:
                break
        if accepted == num:
            return (*proposals, inverse_cdf(target[num], uniforms[-1]))
        scale = 1 if plain_residual else scales[accepted]
        rest = residual(target[accepted], draft[accepted], scale)
        return (*proposals[:accepted], inverse_cdf(rest, uniforms[-1]))

    return rule


def walk_of(decide):
    """A rule for trees from one for the children of a node, which gives a child or weights."""

    def rule(target, draft, tokens, parents, uniforms):
        node, path = 0, ()
        while True:
            children = [c for c in range(node + 1, len(tokens)) if parents[c] == node]
            child, weights = None, target[node]
            if children:
                shares = [tokens[c] for c in children]
                coins = [uniforms[c] for c in children]
                index, weights = decide(target[node], draft[node], shares, uniforms[node], coins)
                child = None if index is None else children[index]
            if child is None:
                extra = inverse_cdf(weights, uniforms[-1])
                return path, (*(tokens[c] for c in path), extra)
            node, path = child, (*path, child)

    return rule


@walk_of
def every_sibling_alike(target, draft, tokens, coin, coins):
    """Tests every sibling against the same two rows, then draws from their difference."""
    for index, token in enumerate(tokens):
        if coins[index] * weight(draft, token) < weight(target, token):
            return index, None
    return None, residual(target, draft)


@walk_of
def repeated_siblings_count_again(target, draft, tokens, coin, coins):
    """target_only without a look at whether a token was there already."""
    cumulative = 0
    for index, token in enumerate(tokens):
        share = weight(target, token)
        cumulative = cumulative + share
        if share > 0 and coin < cumulative:
            return index, None
    return None, without(target, set(tokens))


@walk_of
def coin_zero_accepts(target, draft, tokens, coin, coins):
    """target_only with equality: a number of 0 accepts a child of probability 0."""
    cumulative, seen = 0, set()
    for index, token in enumerate(tokens):
        if token not in seen:
            cumulative = cumulative + weight(target, token)
            if coin <= cumulative:
                return index, None
        seen.add(token)
    return None, without(target, seen)


@walk_of
def siblings_not_zeroed(target, draft, tokens, coin, coins):
    """target_only that draws the extra token from the target as it is."""
    cumulative, seen = 0, set()
    for index, token in enumerate(tokens):
        if token not in seen:
            cumulative = cumulative + weight(target, token)
            if coin < cumulative:
                return index, None
        seen.add(token)
    return None, target


@walk_of
def draft_not_taken_away(target, draft, tokens, coin, coins):
    """Tests the siblings one by one, but never changes what is left of the target."""
    left = draft
    for index, token in enumerate(tokens):
        if coins[index] * weight(left, token) < weight(target, token):
            return index, None
        rest = [0 if x == token else share for x, share in enumerate(left)]
        left = normalised(rest) if sum(rest) > 0 else rest
    return None, target


@walk_of
def one_coin_for_all_siblings(target, draft, tokens, coin, coins):
    """Without replacement, but each sibling is held against the same number."""
    for index, token in enumerate(tokens):
        if coin * weight(draft, token) < weight(target, token):
            return index, None
        target = normalised(residual(target, draft))
        rest = [0 if x == token else share for x, share in enumerate(draft)]
        draft = normalised(rest) if sum(rest) > 0 else rest
    return None, target
