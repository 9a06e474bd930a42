"""What a launch line does wrong: alone, with its neighbours in the file, and with its job."""

from collections.abc import Iterator
from dataclasses import replace

from paceline.check.lint.configs.degrees import check_megatron
from paceline.check.lint.configs.launch_line import Launch, launches_in, whole
from paceline.check.lint.configs.say import Fault
from paceline.check.lint.configs.scene import job_of, started
from paceline.check.lint.configs.shell import Script
from paceline.check.lint.configs.variables import check_port, check_variables
from paceline.check.lint.context import Context


def check_script(script: Script, context: Context) -> Iterator[Fault]:
    """Everything a shell script shows: its variables, its launches, and the two together."""
    launches, job = launches_in(script), job_of(script, context)
    said = {started(one, job).nodes for one in launches if one.program != "python"}
    if job.nodes is None and len(said) == 1 and not script.is_batch:
        job = replace(job, nodes=said.pop())
    inline = [each for command in script.commands for each in command.environment]
    yield from check_variables([*script.variables, *inline], job)
    for launch in launches:
        yield from check_launch(launch, job, context)


def check_launch(launch: Launch, job: Context, context: Context) -> Iterator[Fault]:
    """Everything that one launch line shows by itself and with what is known of its job."""
    port = launch.option("master_port", "main_process_port")
    if port is not None and (number := whole(port.text)) is not None:
        yield from check_port(port, "the port", number)
    yield from check_megatron(launch, started(launch, job).world_size or context.num_processes)
