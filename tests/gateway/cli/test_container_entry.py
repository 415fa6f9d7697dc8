"""The standalone server as SageMaker starts it: what it finds in the container's folders, and what that changes."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.catalog import served_folder
from gateway.cli import config, serve
from gateway.cli.main import program
from gateway.config import Config, ModelConfig, RepositoryConfig, SageMakerConfig, environment
from gateway.config.load import resolve
from gateway.config.problem import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /opt/ml/model."""
    made = tmp_path / "model"
    monkeypatch.setattr(served_folder, "MODEL_FOLDER", made)
    monkeypatch.setattr(environment, "MODEL_FOLDER", made)
    return made


def config_of(folder: Path, *, code: bool = False) -> Config:
    roots = (str(folder),)
    return Config(repository=RepositoryConfig(roots=roots, code=roots if code else ()))


def test_the_model_in_the_containers_folder_is_the_one_that_is_served(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.toml").write_text('factory = "echo"\n')
    assert list(serve.make_gateway(config_of(folder)).supervisor.workers) == ["model"]


def test_its_code_runs_where_the_configuration_allows_it(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.py").write_text("def model(text: str) -> str:\n    return text.upper()\n")
    assert list(serve.make_gateway(config_of(folder, code=True)).supervisor.workers) == ["model"]
    with pytest.raises(ConfigError, match=r"repository\.code"):
        serve.make_gateway(config_of(folder))


def test_a_model_that_cannot_be_served_is_not_replaced_by_another(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.toml").write_text('factory = "no_such_model"\n')
    with pytest.raises(ConfigError, match=r"model\.toml.*no_such_model"):
        serve.make_gateway(config_of(folder))


def test_how_it_is_served_without_which_it_is_is_not_passed_over(folder: Path) -> None:
    folder.mkdir()
    (folder / "serving.properties").write_text("option.model_id=gpt2\n")
    with pytest.raises(ConfigError, match=r"neither model\.toml nor model\.py: serving\.properties says how"):
        serve.make_gateway(config_of(folder))


def test_an_empty_folder_is_no_model(folder: Path) -> None:
    folder.mkdir()
    assert "echo" in serve.make_gateway(config_of(folder)).supervisor.workers


def test_a_multi_model_container_begins_without_a_model(folder: Path) -> None:
    gateway = serve.make_gateway(Config(sagemaker=SageMakerConfig(multi_model=True)))
    assert not gateway.supervisor.workers


def test_the_folder_is_a_sign_of_a_container_as_the_variables_are(folder: Path) -> None:
    at_home = resolve(file=None, environ={}, overrides={})
    assert at_home.config.listen.host == "127.0.0.1"
    folder.mkdir()
    inside = resolve(file=None, environ={}, overrides={})
    assert (inside.config.listen.host, inside.config.drain.timeout) == ("0.0.0.0", 20.0)
    assert inside.sources["listen.host"] == str(folder)
    told = resolve(file=None, environ={"EVERYWIRE_LISTEN__HOST": "10.0.0.1"}, overrides={})
    assert told.config.listen.host == "10.0.0.1"


def test_what_the_models_own_files_say_is_shown_with_the_configuration(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(config, "MODEL_FOLDER", folder)
    monkeypatch.chdir(tmp_path)
    folder.mkdir()
    (folder / "model.toml").write_text('factory = "echo"\ncapacity = 3\n')
    (folder / "serving.properties").write_text("option.max_rolling_batch_size=9\njob_queue_size=5\noption.tgi_compat=true\n")
    arguments = ["--set", f"repository.roots={folder}", "config", "show", "--changed"]
    shown = CliRunner().invoke(program, arguments).output
    said, _, rest = shown.partition("\n\n")
    first, *others = said.splitlines()
    assert first == "# Files of the model's own folder say:"
    assert sorted(others) == [
        f"# models.model.capacity = 3  # {folder}/model.toml",
        f'# models.model.factory = "models.library.echo:Echo"  # {folder}/model.toml',
        f"# models.model.lmi.tgi_compat = true  # {folder}/serving.properties",
        f"# models.model.queue = 5  # {folder}/serving.properties",
    ]
    assert rest.startswith("[listen]\n")
    told = json.loads(CliRunner().invoke(program, [*arguments, "--json"]).output)
    assert told["models.model.queue"] == {"value": 5, "source": f"{folder}/serving.properties"}
    (folder / "serving.properties").write_text("job_queue_size=0\n")
    for command in (["check"], ["show"]):
        result = CliRunner().invoke(program, [*arguments[:3], *command])
        assert result.exit_code == 2
        assert "serving.properties: job_queue_size must be a whole number from 1" in result.output


def test_another_folder_is_served_by_another_name_beside_what_is_configured(tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_text('factory = "add_sub"\n')
    chosen = RepositoryConfig(model=str(tmp_path), model_name="sums", roots=(str(tmp_path),))
    alone = serve.make_gateway(Config(repository=chosen))
    assert list(alone.supervisor.workers) == ["sums"]
    configured = {"echo": ModelConfig(factory="models.library.echo:Echo")}
    both = serve.make_gateway(Config(repository=chosen, models=configured))
    assert sorted(both.supervisor.workers) == ["echo", "sums"]


def test_a_folder_that_is_named_must_hold_a_model(tmp_path: Path) -> None:
    chosen = RepositoryConfig(model=str(tmp_path), roots=(str(tmp_path),))
    with pytest.raises(ConfigError, match=r"holds neither model\.toml nor model\.py"):
        serve.make_gateway(Config(repository=chosen))


def test_the_name_of_the_folders_model_is_nobody_elses() -> None:
    overrides = {"repository.model": "/opt/ml/model", "models.model.factory": "models.library.echo:Echo"}
    with pytest.raises(ConfigError, match=r"^repository\.model_name and models\.model\.factory .* of one name"):
        resolve(file=None, environ={}, overrides=overrides)
    with pytest.raises(ConfigError, match=r"^repository\.model .*'/mnt' is neither one of repository\.roots"):
        resolve(file=None, environ={}, overrides={"repository.model": "/mnt"})
