"""Handlers with side effects: `fencepost work --app orders:app`."""

import random
from dataclasses import dataclass

import fencepost
from fencepost import config
from fencepost.effects.config import Downstreams
from fencepost.effects.sql import sql

downstreams = Downstreams(config.load().downstreams)
app = fencepost.App(downstreams=downstreams.values())


@dataclass
class Order:
    customer: str
    euros: int


@app.task("invoice", ttl=2.0)  # a short lease, so that this page need not wait for long
async def invoice(attempt: fencepost.Attempt, order: Order) -> dict[str, str]:
    words = random.choice(["Dear {}, please pay {} euros.", "Hello {}! {} euros are due."])  # as a language model would
    attempt.usage(tokens=900, usd=0.02)
    mail = {"text": words.format(order.customer, order.euros)}
    receipt = await attempt.effect("send-invoice", mail, using=downstreams["mail"], on_conflict="adopt")
    return {"sent": receipt["mail"]}


@app.task("final-notice", ttl=2.0)
async def final_notice(attempt: fencepost.Attempt, order: Order) -> dict[str, str]:
    letter = {"text": f"{order.customer}, this is our last letter about {order.euros} euros."}
    receipt = await attempt.effect("send-letter", letter, using=downstreams["letter"])
    return {"sent": receipt["mail"]}


@app.task("book")
async def book(attempt: fencepost.Attempt, order: Order) -> str:
    row = {
        "sql": "INSERT INTO booked (customer, euros) VALUES (?, ?)",
        "parameters": [order.customer, order.euros],
    }
    await attempt.effect("book", row, using=sql)  # Deferred: it happens together with the commit
    return "booked"
