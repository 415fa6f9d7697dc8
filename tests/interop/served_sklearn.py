"""Pipelines of scikit-learn with a column of text, as their author would serve them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

Text = npt.NDArray[np.str_]
Numbers = npt.NDArray[np.float64]

PLANS = np.array(["bronze", "silver", "gold", "größter"])
TEXTS = np.array(["a fine day", "a bad day", "schöne Grüße", "never again", "fine, fine 😀", "bad and worse"])


def rows_of(plan: Text, usage: Numbers) -> npt.NDArray[Any]:
    """The two columns as scikit-learn takes mixed ones."""
    rows = np.empty((len(plan), 2), object)
    rows[:, 0], rows[:, 1] = plan, usage
    return rows


def _fitted() -> tuple[Any, Any]:
    rng = np.random.default_rng(7)
    plan, usage = rng.choice(PLANS, 400), rng.normal(50.0, 20.0, 400)
    left = (plan == "bronze") | (usage < 30)
    columns = ColumnTransformer([("plan", OneHotEncoder(handle_unknown="ignore"), [0]), ("usage", StandardScaler(), [1])])
    churn = make_pipeline(columns, LogisticRegression()).fit(rows_of(plan, usage), left)
    mood = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(TEXTS, [1, 0, 1, 0, 1, 0])
    return churn, mood


CHURN, MOOD = _fitted()


def churn(plan: Text, usage: Numbers) -> Numbers:
    probabilities: Numbers = CHURN.predict_proba(rows_of(plan, usage))
    return probabilities


async def churn_async(plan: Text, usage: Numbers) -> Numbers:
    return churn(plan, usage)


def mood(text: Text) -> Numbers:
    probabilities: Numbers = MOOD.predict_proba(text)
    return probabilities
