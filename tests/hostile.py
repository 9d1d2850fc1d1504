"""One table of hostile values for every path that carries what a person typed."""

# Every one of these must arrive exactly as it is, or be refused.
CARRIED = [
    "plain",
    "two words",
    " outer blanks ",
    "it's",
    'say "hi"',
    "$(touch pwned)",
    "`touch pwned`",
    "$HOME ${HOME}",
    "a;touch pwned",
    "a && touch pwned | cat",
    "back\\slash",
    "trailing\\",
    "-leading-dash",
    "--nodes=9",
    "#not a comment",
    "a #SBATCH --nodes=9",
    "comma,separated,K=V",
    "100%j %t %%",
    "~root",
    "*?[a-z]",
    "{a,b}",
    "!history",
    "ünïcödé ☃",
    "a=b=c",
    "<in >out",
    "line\u2028separator and next\u0085line",
    "\u2028#REQUEST {}",
    "{{ jinja }} {% raw %}",
    "",
]

# Line ends and NUL would end the line that carries them; the others have no business in a name.
REFUSED = [
    "new\nline",
    "new\n#SBATCH --nodes=9",
    "carriage\rreturn",
    "nul\0byte",
    "bell\a",
    "escape\x1b[31m",
    "surrogate\udc80",
]
