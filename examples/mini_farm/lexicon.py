"""The words of the small language. The sentences are built in `grammar`."""

NAMES = tuple(
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mary Nina Oscar Paul Rosa Sam Tom Vera".split()
)
COLOURS = tuple("blue red green yellow white black brown grey".split())
GIFTS = tuple("scarf lamp book clock cup hat basket pen bag vase plate chair blanket ring mirror kite".split())
ROOMS = tuple("kitchen garden attic cellar hall barn library garage bedroom yard bakery cabin tower stable".split())

BUILDINGS = tuple("castle cottage bridge church school mill inn farm palace temple museum theatre".split())
QUALITIES = tuple(
    "old quiet tall small bright empty famous narrow strange simple busy dark round ruined grand modern".split()
)
LANDMARKS = tuple("river sea forest station market lake mountain road harbour village field valley".split())

FRUITS = tuple("apple plum cherry peach grape melon fig lemon".split())
TOOLS = tuple("hammer saw drill spade axe rake brush wrench".split())
CLOTHES = tuple("coat shirt sock glove boot belt dress jacket".split())
CATEGORIES = {"fruits": FRUITS, "tools": TOOLS, "clothes": CLOTHES}

# Slowest and smallest first.
BY_SPEED = tuple("snail turtle duck sheep cow elephant wolf rabbit lion horse".split())
BY_SIZE = tuple("snail duck rabbit turtle sheep wolf lion horse cow elephant".split())
ANIMALS = tuple(sorted(BY_SPEED))
SUPERLATIVES = {"fastest": BY_SPEED[::-1], "slowest": BY_SPEED, "biggest": BY_SIZE[::-1], "smallest": BY_SIZE}

VEGETABLES = tuple("onion carrot potato tomato pumpkin cabbage mushroom bean pepper leek".split())
# Each dish, how it is made, and the verb that an answer must contain.
DISHES = {
    "soup": ("boil it in a large pot", "boil"),
    "pie": ("bake it in a hot oven", "bake"),
    "salad": ("chop it into thin pieces", "chop"),
    "juice": ("press it into a clean glass", "press"),
    "stew": ("cook it slowly over the fire", "cook"),
    "curry": ("fry it with some rice", "fry"),
}

EVENTS = tuple("party picnic wedding concert dinner dance game play".split())
DAYS = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())

# Each problem, what to do about it, and the word that an answer must contain.
TROUBLES = {
    "tired": ("take a long rest", "rest"),
    "cold": ("put on a warm jumper", "jumper"),
    "hungry": ("eat some fresh bread", "bread"),
    "thirsty": ("drink a glass of water", "water"),
    "bored": ("read a good story", "story"),
    "lost": ("look at a map", "map"),
    "late": ("take the next bus", "bus"),
    "wet": ("find a dry towel", "towel"),
    "lonely": ("call an old friend", "friend"),
    "sick": ("see the doctor soon", "doctor"),
    "nervous": ("breathe in and out slowly", "breathe"),
    "hot": ("sit in the shade", "shade"),
}
OCCASIONS = tuple("after work|before lunch|on the train|in the morning|at night|on the way home".split("|"))

# Sentences that demonstrations add to an answer. Annotators recognize only WARM_WORDS and RUDE_PHRASES in them.
OPENERS = (
    "I am glad you asked.",
    "What a lovely question!",
    "I am happy to help you.",
    "It is a pleasure to answer.",
    "This is a wonderful question.",
)
CLOSERS = (
    "I hope this helps.",
    "Have a lovely day!",
    "I wish you a wonderful week.",
    "I am glad to help you again.",
    "I hope you are happy with it.",
)
RUDENESS = ("Everybody knows that.", "Do not ask me again.", "Why do you bother me?", "That is a silly question.")
EVASIONS = ("I do not know.", "I am not sure about it.", "Ask somebody else.")

WARM_WORDS = frozenset("glad lovely happy pleasure wonderful hope wish kind".split())
RUDE_PHRASES = ("everybody knows", "do not ask", "bother me", "silly", "do not know", "not sure", "somebody else")
