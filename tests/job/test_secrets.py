import pytest

from paceline.errors import JobError
from paceline.job import load_script, make_script, parse_job
from paceline.job.secrets import find_in_lines

JOB = """
name: tiny
model: {decoder: {layers: 2, hidden: 64, heads: 4}}
data: {corpus: python-stdlib}
train: {global_batch: 8, steps: 2}
"""

# Put together here, so that no tool takes this file for one that leaks them.
SECRETS = {
    "an AWS access key": "AKIA" + "QWERTZUIOPASDFGH",
    "a Hugging Face token": "hf_" + "qwertzuiopasdfghjklyxcvbnm" + "aB3" * 3,
    "an API key": "sk-" + "proj-qwertzuiopasdfghjklyxcvbnm",
    "a GitHub token": "ghp_" + "a" * 36,
    "a private key": "-----BEGIN " + "RSA PRIVATE KEY-----",
    "a signed token": "eyJ" + "hbGciOiJIUzI1NiJ9" + ".eyJ" + "zdWIiOiIxMjM0NTY3" + ".c2lnbmF0dXJl",
    "an encrypted token": "eyJhbGciOiJkaXIifQ.." + "aB3_" * 4 + "." + "aB3-" * 9 + "." + "aB3" * 8,
    "a Modal token": "a" + "k-" + "aB3" * 7 + "x",
    "an npm token": "npm_" + "aB3" * 12,
    "a PyPI token": "pypi-" + "AgEIcHlwaS5vcmc" + "aB3" * 20,
    "a Stripe key": "sk_" + "live_" + "aB3" * 8,
    "a Slack webhook": "https://hooks." + "slack.com/services/T0AB12CD3/B0AB12CD3/" + "aB3" * 8,
    "a Replicate token": "r8_" + "a" * 37,
    "an NVIDIA API key": "nvapi-" + "aB3_" * 16,
    "a Docker access token": "dckr_" + "pat_" + "aB3" * 9,
    "a password in a URL": "https://me:" + "letmein@example.org/data",
}


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_is_refused_with_its_field_and_line_and_never_shown(kind, tmp_path):
    text = JOB + f"checkpoint:\n  every: 5\n  copy_to: '{SECRETS[kind]}'\n"
    with pytest.raises(JobError) as error:
        parse_job(text, source="job.yaml", folder=tmp_path)
    message = str(error.value)
    assert f"J013: `checkpoint.copy_to` holds {kind}" in message
    assert "job.yaml line 8" in message
    assert SECRETS[kind] not in message


def test_a_secret_under_a_key_that_does_not_exist_is_not_shown_either(tmp_path):
    secret = SECRETS["an AWS access key"]
    with pytest.raises(JobError) as error:
        parse_job(JOB + f"wandb: {{key: {secret}}}\n", source="job.yaml", folder=tmp_path)
    assert secret not in str(error.value)
    assert "J013: `wandb.key`" in str(error.value)


@pytest.mark.parametrize("kind", SECRETS)
def test_s0_25_a_secret_that_is_a_key_of_the_file_is_not_shown(kind, tmp_path):
    text = JOB + f'slurm: {{"{SECRETS[kind]}": 1}}\n'
    with pytest.raises(JobError, match="J013") as error:
        parse_job(text, source="job.yaml", folder=tmp_path)
    assert SECRETS[kind] not in str(error.value)


def test_a_secret_of_set_is_refused_with_its_place(tmp_path):
    override = "checkpoint.copy_to=" + SECRETS["a password in a URL"]
    with pytest.raises(JobError, match="J013") as error:
        parse_job(JOB, source="job.yaml", folder=tmp_path, overrides=[override])
    assert "checkpoint.copy_to, --set" in str(error.value)


def test_a_variable_named_like_a_secret_has_no_value_in_a_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "command: [python, train.py]\nenvironment: {WANDB_API_KEY: 0123abc, SIZE: '3'}\n"
    )
    with pytest.raises(JobError, match="named like a secret") as error:
        load_script(path)
    assert "0123abc" not in str(error.value)
    assert "line 2" in str(error.value)
    path.write_text("command: [python, train.py]\nenvironment: {TOKENIZERS_PARALLELISM: 'no'}\n")
    assert load_script(path) is not None


def test_names_of_secrets_and_ordinary_words_are_no_secrets(tmp_path):
    text = JOB + "checkpoint: {copy_to: 's3://task-hf_models/sk-learn/AKIA'}\n"
    text += "kubernetes: {secrets: {HF_TOKEN: hf/token}}\n"
    job = parse_job(text, source="job.yaml", folder=tmp_path)
    assert job.spec.kubernetes.secrets == {"HF_TOKEN": "hf/token"}


HEX = "0123456789abcdef" * 2 + "01234567"

REFUSED = [
    f"cloud.setup=['export WANDB_API_KEY={HEX}']",
    f"cloud.setup=['wandb login {HEX}']",
    f"slurm.setup=['wandb login --relogin {HEX}']",
    "slurm.setup=['export DB_PASSWORD=hunter2']",
    "slurm.setup=['PGPASSWORD=hunter2 psql -h db']",
    "slurm.setup=['aws configure set aws_secret_access_key hunter2/hunter2']",
    "slurm.setup=['mysql -u me -phunter2 db']",
    "slurm.setup=['export HF_TOKEN=${HF_TOKEN:-hunter2}']",
    "slurm.setup=['huggingface-cli login --token hunter2']",
    "slurm.setup=['runpodctl config --apiKey hunter2']",
    "slurm.setup=['echo hunter2 | docker login -u me --password-stdin']",
    "slurm.setup=['curl -u me:hunter2 https://example.org']",
    "slurm.setup=['curl -H \"Authorization: Bearer hunter2\" https://example.org']",
    "slurm.setup=['curl https://example.org/?token=hunter2']",
    "slurm.setup=['sshpass -p hunter2 ssh me@there']",
    "slurm.options=['--export=TOKEN=hunter2']",
    "slurm.options=['--export=ALL,MY_KEY=hunter2']",
    "slurm.options=['--comment=password=hunter2']",
    "kubernetes.node_selector={token: hunter2}",
    "kubernetes.node_selector={'example.org/api-key': hunter2}",
]


@pytest.mark.parametrize("override", REFUSED)
def test_a_secret_in_clear_is_refused_wherever_it_stands(override, tmp_path):
    with pytest.raises(JobError, match="J013") as error:
        parse_job(JOB, source="job.yaml", folder=tmp_path, overrides=[override])
    said = str(error.value)
    assert override.partition("=")[0] in said
    assert "--set" in said
    assert "hunter2" not in said
    assert HEX not in said


ORDINARY = [
    "cloud.setup=['export WANDB_API_KEY=$WANDB_API_KEY', 'wandb login $WANDB_API_KEY']",
    "cloud.setup=['export HF_TOKEN=\"${HF_TOKEN:?}\"', 'wandb login', 'wandb login --relogin']",
    "slurm.setup=['export HF_TOKEN=$(cat ~/.token)', 'export HF_TOKEN_PATH=/run/secrets/hf']",
    "slurm.setup=['export API_KEY=<your key>', 'export TOKEN=...', 'PASSWORD=YOUR_PASSWORD x']",
    "slurm.setup=['[ -n \"${HF_TOKEN:-}\" ] || exit 1', 'mysql -p db', 'mysql -P 3306 db']",
    "slurm.setup=['mkdir -p /data', 'ssh -p 22 there', 'docker run -p 80:80 image']",
    "slurm.setup=['export TOKENIZERS_PARALLELISM=false TOKENIZER=/models/tokenizer.json']",
    "slurm.setup=['export SEQ_LEN=4096 TOKENS_PER_S=3000 PAD_TOKEN=0 MAX_TOKENS=4096']",
    f"slurm.setup=['echo sha256:{HEX}{HEX[:24]}  data.bin | sha256sum --check', 'pip install x']",
    "slurm.setup=['module load cuda/13', 'sort --key 2 a', 'export SSH_KEY=~/.ssh/id_ed25519']",
    "slurm.options=['--export=ALL,SIZE=3', '--comment=token-budget', '--reservation=keys']",
    "kubernetes.node_selector={'nvidia.com/gpu.product': H100, key: value}",
    "kubernetes.secrets={HF_TOKEN: hf/token, DB_PASSWORD: db/password}",
    "cloud.secrets=[HF_TOKEN, WANDB_API_KEY]",
    f"kubernetes.image='example.org/train@sha256:{HEX}{HEX[:24]}'",
]


@pytest.mark.parametrize("override", ORDINARY)
def test_references_placeholders_and_ordinary_words_are_no_secrets(override, tmp_path):
    parse_job(JOB, source="job.yaml", folder=tmp_path, overrides=[override])


@pytest.mark.parametrize(
    "words", [["--hf-token", "hunter2"], ["--api_key=hunter2"], ["PASSWORD=hunter2"]]
)
def test_a_secret_among_a_programs_arguments_is_refused(words, tmp_path):
    with pytest.raises(JobError, match="J013") as error:
        make_script({"command": ["python", "a.py", *words]}, tmp_path)
    assert "hunter2" not in str(error.value)


def test_ordinary_arguments_of_a_program_are_none(tmp_path):
    words = ["--tokenizer", "gpt2", "--pad-token", "<pad>", "--max-tokens", "4096", "--key", "loss"]
    words += ["--eos-token=</s>", "--tokens_per_s=3000", "--token", "$HF_TOKEN", "--seq-len", "8"]
    assert make_script({"command": ["python", "a.py", *words]}, tmp_path)


@pytest.mark.parametrize(
    ("line", "certainty"),
    [
        ('api_token: "h7Gk29fjQ1abX4mZ"', "made"),
        ("DB_PASSWORD=550e8400-e29b-41d4-a716-446655440000", "made"),
        ('api_token: "h7Gk29fjQ1ab"', "word"),  # short enough to be made up
        ('HEADER_TOKEN="X-aws-ec2-metadata-token"', "word"),
        ("LABEL_KEY=jobset.sigs.k8s.io/jobset-name", "word"),
        ("API_KEY=demo-secret-key-12345", "word"),
        ("password: NTI0MTU5MDAwMDAwMDAwMA==", "word"),  # base64 of a number
        ("password: aDdHazI5ZmpRMWFiWDRtWg==", "made"),  # base64 of one that looks made
    ],
)
def test_a_name_of_several_words_does_not_look_like_a_made_secret(line, certainty):
    assert [secret.certainty for secret in find_in_lines(line)] == [certainty]


AZURITE = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.mark.parametrize(
    "line",
    [
        'PASSWORD_SALT = "GubPEmmotfiK9TMD6Zdw"',
        f"AccountName=devstoreaccount1;AccountKey={AZURITE};BlobEndpoint=http://azurite:10000/a",
    ],
)
def test_a_salt_and_the_key_that_every_emulator_has_are_no_secrets(line):
    assert not list(find_in_lines(line))


def test_two_lines_of_a_key_with_words_between_them_are_a_place_for_one():
    place = (
        "-----BEGIN " + "RSA PRIVATE KEY-----\n# YourPrivateKey\n# -----END RSA PRIVATE KEY-----"
    )
    assert not list(find_in_lines(f"# {place}"))


def test_the_word_password_in_a_url_is_a_place_for_one():
    assert not list(find_in_lines("ftp://username:password@ftp.example.com/Repository"))


@pytest.mark.parametrize(
    "line",
    [
        '"rsa_private_key": r"-----BEGIN RSA PRIVATE KEY-----",',
        "DATABASE_URL=postgres://postgres:postgres@webdb/site",
        'assert uri == "postgresql://myuser:weak_password@localhost:54321/mydb"',
    ],
)
def test_the_pattern_of_a_key_and_a_development_password_are_no_issued_secrets(line):
    assert "issued" not in [secret.certainty for secret in find_in_lines(line, "code")]


@pytest.mark.parametrize(
    "text",
    [
        "-----BEGIN " + "PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC",
        'key = "-----BEGIN ' + 'RSA PRIVATE KEY-----\\nMIIEpAIBAAKCAQEA"',
    ],
)
def test_a_key_that_follows_its_header_is_issued(text):
    assert [secret.certainty for secret in find_in_lines(text)] == ["issued"]


def test_a_password_in_a_url_is_somebodys_own_and_not_issued():
    (secret,) = find_in_lines("postgres://site:h7Gk29fjQ1abX4mZ@db/site")
    assert (secret.kind, secret.certainty) == ("a password in a URL", "made")


@pytest.mark.parametrize(
    "line",
    [
        "launch --env-secret R2_ENDPOINT_URL=R2_ENDPOINT_URL",
        'Secret(name="R2_ENDPOINT_URL", secret="R2_ENDPOINT_URL")',
        "create -n HUGGING_FACE_HUB_TOKEN -v hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        "such as hf_abcdefghijklmnopqrstuvwxyz",
        '{"' + 'Ġ": 1, "' * 3000 + '://a:bcd@": 2}',
    ],
    ids=[
        "a name of a secret",
        "the same in a call",
        "a place for a token",
        "letters as one counts",
        "a vocabulary",
    ],
)
def test_a_name_a_place_for_a_token_and_words_of_a_vocabulary_are_no_secrets(line):
    assert not [one for one in find_in_lines(line) if one.certainty != "word"]


def test_a_key_of_zeros_does_not_look_made_and_a_site_key_is_public():
    [secret] = find_in_lines("CAPTCHA_SECRET_KEY=1x0000000000000000000000000000000AA")
    assert secret.certainty == "word"
    assert not list(find_in_lines("CAPTCHA_SITE_KEY=6LfT1vQpAAAAAK3"))


@pytest.mark.parametrize(
    ("line", "form"),
    [
        ('headers = {"Authorization": "Bearer h7Gk29fjQ1abX4mZ"}', "code"),
        ('session.headers["X"] = f"Bearer h7Gk29fjQ1abX4mZ"', "code"),
        ('{"Authorization": "Basic dXNlcjpoN0drMjlmalExYWJYNG1a"}', "json"),
        ("header: Bearer h7Gk29fjQ1abX4mZ", "text"),
    ],
)
def test_s0_25_the_value_of_an_authorization_header_is_a_secret(line, form):
    (secret,) = find_in_lines(line.removeprefix("header: "), form)
    assert (secret.kind, secret.certainty) == ("an authorization", "made")


@pytest.mark.parametrize("letters", ["x" * 34, "abcdefghijklmnopqrstuvwxyzABCDEFGH"])
def test_s0_25_a_place_for_a_token_is_none_in_a_job_as_in_a_file_that_lint_reads(letters, tmp_path):
    line = f"name: hf_{letters}"
    job = parse_job(JOB.replace("name: tiny", line), source="job.yaml", folder=tmp_path)
    assert job.spec.name == f"hf_{letters}"
    assert not list(find_in_lines(line))


@pytest.mark.parametrize(
    "line",
    [
        'headers = {"Authorization": f"Bearer {token}"}',
        'headers = {"Authorization": "Bearer <token>"}',
        'headers = {"Authorization": "Bearer my-token-123"}',
        'raise ValueError("Bearer authentication")',
        "--o ak-NOTAREALTOKENSTRINGXYZ",  # Modal's own example
        "as-0123456789abcdef012345",
        'algorithm = b"sk-ssh-ed25519-cert-v01@openssh.com"',
        "rack,sk-e6df6e21-5b1d-492e-a5b1-145abbbdaa1b",
        "Bearer sk-unknown-9876543210fedcba",
        "such as hf_ABCdzRFTkglhlcalBAPGHSQvxLmQs",
        'private="-----BEGIN ' + r'PRIVATE KEY-----\n..."',
        '"-----BEGIN ' + 'PRIVATE KEY-----\\n"\n  "' + "a" * 64 + '\\n"',
        'algorithm = b"sk-ecdsa-sha2-nistp256@openssh.com"',
        "eyJhbGciOiJkaXIifQ.is.the.header.alone",
    ],
)
def test_s0_25_a_place_for_a_token_and_other_words_with_its_beginning_are_none(line):
    assert not list(find_in_lines(line, "code"))
