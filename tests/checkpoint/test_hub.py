"""Uploads to the hub, with a stand-in for its API: the login is checked at the start."""

from pathlib import Path

import pytest

from alpaca_ppo.checkpoint import export as hub
from alpaca_ppo.checkpoint.export import push_folder
from tests.tiny_runs import tiny_trainer


class Api:
    """Records what is uploaded by a user whose token has `role`."""

    calls: list = []
    role: str | None = "write"

    def whoami(self):
        if self.role is None:
            raise OSError("Token is required\nsecond line")
        return {"name": "me", "auth": {"accessToken": {"displayName": "laptop", "role": self.role}}}

    def create_repo(self, repo_id, *, exist_ok):
        self.calls.append(("create", repo_id, exist_ok))
        return f"https://hub/{repo_id}"

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.calls.append(("upload", repo_id, sorted(path.name for path in Path(folder_path).iterdir())))


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(Api, "calls", [])
    return Api


def test_pushing_makes_the_repository_and_uploads_the_folder(tmp_path, api):
    (tmp_path / "file").write_text("")
    assert push_folder(tmp_path, "me/model") == "https://hub/me/model"
    assert api.calls == [("create", "me/model", True), ("upload", "me/model", ["file"])]


@pytest.mark.parametrize(
    ("role", "message"),
    [
        (None, r"the hub does not know who you are \(OSError: Token is required\); log in .*hub_model_id: null"),
        ("read", "the token 'laptop' of 'me' may only read; make one that may write"),
    ],
)
def test_a_run_that_could_not_upload_does_not_start(tmp_path, api, monkeypatch, role, message):
    monkeypatch.setattr(api, "role", role)
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, hub_model_id="me/model")


def test_the_policy_is_uploaded_on_request_and_at_the_end(tmp_path, api):
    trainer = tiny_trainer(tmp_path, hub_model_id="me/model", total_episodes=10)
    assert api.calls == []
    assert trainer.push_to_hub() == "https://hub/me/model"
    assert trainer.push_to_hub("other") == "https://hub/other"
    assert not (tmp_path / "final").exists()
    assert [(kind, name) for kind, name, _ in api.calls] == [
        (kind, name) for name in ("me/model", "other") for kind in ("create", "upload")
    ]
    assert {"config.json", "model.safetensors", "README.md"} <= set(api.calls[1][2])
    trainer.train()
    assert len(api.calls) == 6 and api.calls[5][:2] == ("upload", "me/model")


def test_a_push_without_a_repository_is_refused(tmp_path, api):
    with pytest.raises(ValueError, match="hub_model_id is None"):
        tiny_trainer(tmp_path).push_to_hub()
