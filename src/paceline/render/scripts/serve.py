"""Answers requests with the model in this folder, over HTTP.

    pip install -r requirements.txt
    uvicorn serve:app --host 127.0.0.1 --port 8000

GET /health, POST /predict, and POST /predict/batch for up to 100 inputs; /docs shows the fields.
There is no login: before others can reach it, put it behind a proxy that has one.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Lock
from typing import Literal

from fastapi import FastAPI, HTTPException
from model import Input, Model, Output
from pydantic import BaseModel, ConfigDict, Field


class Batch(BaseModel):
    """Inputs that the model takes together."""

    model_config = ConfigDict(extra="forbid")

    inputs: list[Input] = Field(min_length=1, max_length=100)


class Answers(BaseModel):
    """One output for each input, in their order."""

    outputs: list[Output]


class Health(BaseModel):
    """What is loaded. There is no answer before it is."""

    status: Literal["ok"] = "ok"
    task: str
    architecture: str
    parameters: int
    device: str


@asynccontextmanager
async def load_model(app: FastAPI) -> AsyncIterator[None]:
    """Load the weights once, before the first request."""
    app.state.model = Model(Path(__file__).parent)
    yield


app = FastAPI(title=Path(__file__).resolve().parent.name, lifespan=load_model)
one_at_a_time = Lock()


@app.get("/health")
def health() -> Health:
    """Whether the model is loaded, and which."""
    model: Model = app.state.model
    return Health(
        task=model.task,
        architecture=type(model.module).__name__,
        parameters=model.module.num_parameters(),
        device=str(model.module.device),
    )


@app.post("/predict")
def predict(given: Input) -> Output:
    """The model's answer to one input."""
    return outputs_of([given])[0]


@app.post("/predict/batch")
def predict_batch(batch: Batch) -> Answers:
    """Its answers to several."""
    return Answers(outputs=outputs_of(batch.inputs))


def outputs_of(inputs: list[Input]) -> list[Output]:
    model: Model = app.state.model
    try:
        with one_at_a_time:
            return model.predict(inputs)
    except ValueError as error:  # an input that does not fit the model
        raise HTTPException(422, str(error)) from None
