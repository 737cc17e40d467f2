"""The words that mailboxes are written with. All names are invented; answers come from pools."""

FIRST_NAMES = (
    *("Ada", "Bruno", "Carla", "Dmitri", "Elif", "Farid", "Greta", "Hana", "Ivo", "Jana", "Kofi"),
    *("Lena", "Marco", "Nadia", "Otis", "Paula", "Quentin", "Rosa", "Samir", "Tilda"),
)
LAST_NAMES = (
    *("Abbott", "Brenner", "Castillo", "Dorsey", "Ekman", "Fontaine", "Grieg", "Hollis", "Iqbal"),
    *("Jansen", "Keller", "Lindqvist", "Moreau", "Novak", "Okafor", "Petrov", "Quist", "Rinaldi"),
    *("Sorensen", "Tanaka"),
)
POOLS = {
    "company": (
        *("Northwind Paper", "Halvorsen Freight", "Bluefin Catering", "Cobalt Hosting"),
        *("Maple Street Print", "Ostrava Tools", "Quarry Lane Legal", "Silverbirch Cleaning"),
        *("Tern Analytics", "Umbra Lighting"),
    ),
    "project": (
        *("Juniper", "Basalt", "Heron", "Saffron", "Meridian", "Tundra", "Copper", "Lantern"),
        *("Orchard", "Pelican"),
    ),
    "item": (
        *("office chairs", "toner cartridges", "server rental", "window cleaning", "the brochure"),
        *("pallet transport", "the summer party", "desk lamps", "the contract review", "badges"),
        *("drill bits", "the survey"),
    ),
    "topic": (
        *("kickoff", "budget review", "risk workshop", "design review", "retrospective"),
        *("supplier call", "steering committee", "training"),
    ),
    "city": ("Lisbon", "Tallinn", "Graz", "Porto", "Bergen", "Leeds", "Ghent", "Turin", "Brno"),
    "room": ("Alder", "Birch", "Cedar", "Dogwood", "Elm", "Fir", "Hazel", "Larch", "Rowan"),
    "hotel": (
        *("Hotel Aurora", "The Old Mill", "Hotel Pergola", "Station Inn", "Casa Verde"),
        *("Harbour House", "Hotel Miramar", "The Weavers"),
    ),
}
GREETINGS = ("Hi,", "Hello,", "Dear all,", "Good morning,", "Hi there,")
CLOSINGS = ("Best,", "Kind regards,", "Thanks,", "Cheers,", "See you,")
ASIDES = (
    "I hope you had a good weekend.",
    "Sorry for the short notice.",
    "As discussed on the phone.",
    "Let me know if anything is unclear.",
    "No need to reply.",
    "I am out of the office on Friday.",
    "Please keep this for your records.",
    "Thanks for your patience.",
)
CHATTER = (
    ("Lunch on {day}", "Is anyone up for lunch on {day}? The place on the corner has soup again."),
    (
        "Status of {project}",
        "Nothing is blocked on {project}. Two more tickets are closed.",
    ),
    ("Parking", "The lower car park is closed on {day} while the lines are painted."),
    (
        "Notes on the {topic}",
        "Here are my notes on the {topic} of {project}. Comments?",
    ),
    ("Welcome, {person}", "Please welcome {person}, who joins the team that works on {project}."),
    ("Coffee machine", "The coffee machine on the second floor is out of order. {person} called."),
    ("About {company}", "Has anyone had trouble with {company} lately? They do not call back."),
    ("Photos from {city}", "The photos from our days in {city} are on the shared drive."),
    ("Question on the {item}", "Who ordered {item}? I have found a box without a name on it."),
    ("Printer", "The printer next to room {room} is short of paper again, says {person}."),
    ("Newsletter", "This month: {project} in numbers, a portrait of {person}, news from {city}."),
    ("Birthday", "{person} has a birthday on {day}; there will be cake in room {room}."),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
